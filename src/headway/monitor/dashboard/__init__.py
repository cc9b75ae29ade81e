"""The live dashboard of runs: a small server over run folders, and a page without a build step."""

from headway.monitor.dashboard.server import make_app, serve, start_in_thread

__all__ = ["make_app", "serve", "start_in_thread"]
