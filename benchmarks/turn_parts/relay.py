"""Pass connections on to a port and count their bytes: `python relay.py PORT COUNTS`. Prints its own port.

`COUNTS` is a file of two 64-bit numbers, which always hold the bytes sent to the port and those that came back.
"""

import asyncio
import mmap
import struct
import sys
from pathlib import Path

Counts = struct.Struct("qq")


class Relay:
    def __init__(self, port: int, counts: Path) -> None:
        self._port = port
        counts.write_bytes(bytes(Counts.size))
        with counts.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), Counts.size)
        self._bytes = [0, 0]

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server, from_server = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pump(reader, from_server, 0), self._pump(to_server, writer, 1))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int) -> None:
        while data := await reader.read(1 << 16):
            self._bytes[way] += len(data)
            self._shared[:] = Counts.pack(*self._bytes)
            writer.write(data)
            await writer.drain()
        writer.close()


async def main(port: int, counts: Path) -> None:
    relay = Relay(port, counts)
    server = await asyncio.start_server(relay.connect, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
