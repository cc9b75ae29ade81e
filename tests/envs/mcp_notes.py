"""A small MCP server for tests: notes by name, over stdio, or over HTTP with a port as argument."""

import os
import pathlib
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes: dict[str, str] = {}


@server.tool()
def write(name: str, text: str) -> str:
    """Write a note."""
    notes[name] = text
    return "written"


@server.tool()
def read(name: str) -> str:
    """Read a note."""
    if name not in notes:
        raise ValueError(f"there is no note {name}")
    return notes[name]


@server.tool()
def variable(name: str) -> str:
    """Tell the value of an environment variable."""
    return os.environ.get(name, "not set")


@server.tool()
def file(path: str) -> str:
    """Read a file of the machine."""
    return pathlib.Path(path).read_text()


@server.tool()
def long(characters: int) -> str:
    """Say much."""
    return "x" * characters


@server.tool()
def pid() -> str:
    """Tell the process's id."""
    return str(os.getpid())


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
