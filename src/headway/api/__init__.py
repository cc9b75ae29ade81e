"""The Python interface: runs, engines and settings from a script or a notebook (`import headway`)."""
