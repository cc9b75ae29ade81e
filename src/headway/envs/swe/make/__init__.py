"""Making of tasks: bugs planted in packages where their tests look."""
