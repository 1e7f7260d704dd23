"""A slow web server for the example: it answers after half a second, to any number of clients."""

import asyncio
from pathlib import Path


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection."""
    try:
        while request := await reader.readuntil(b"\r\n\r\n"):
            await asyncio.sleep(0.5)
            body = request.split()[1]
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    """Serve on a free port and write its address to a file."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    Path("address").write_text(f"http://127.0.0.1:{port}")
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
