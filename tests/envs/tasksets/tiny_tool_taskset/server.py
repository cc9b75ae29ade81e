"""The tool server, which the package starts as a program of its own for every rollout."""

import verifiers.v1 as vf


class AddState(vf.State):
    calls: int = 0


class AddToolset(vf.Toolset[vf.ToolsetConfig, AddState]):
    TOOL_PREFIX = "math"

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.state.calls += 1
        return str(a + b)


if __name__ == "__main__":
    AddToolset.run()
