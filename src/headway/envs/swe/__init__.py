"""Software engineering: repositories with an issue to resolve, judged by hidden tests."""
