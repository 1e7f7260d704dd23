"""Thumbnails: work for the processor, so each one runs in a process of its own."""

from pathlib import Path

from shop.app import app

PICTURES = Path("pictures")


def draw(name: str, width: int, height: int) -> Path:
    """Draw a picture, as binary PPM, which needs no library."""
    PICTURES.mkdir(exist_ok=True)
    rows = (
        bytes((x * 255 // width, y * 255 // height, (x ^ y) % 256))
        for y in range(height)
        for x in range(width)
    )
    path = PICTURES / f"{name}.ppm"
    path.write_bytes(b"P6 %d %d 255\n" % (width, height) + b"".join(rows))
    return path


def shrink(pixels: bytes, width: int, height: int, factor: int) -> bytes:
    """Each pixel of the thumbnail is the average of `factor` x `factor` pixels."""
    small = bytearray()
    for top in range(0, height - factor + 1, factor):
        for left in range(0, width - factor + 1, factor):
            starts = [3 * ((top + row) * width + left) for row in range(factor)]
            for colour in range(3):
                total = sum(
                    sum(pixels[start + colour : start + 3 * factor : 3]) for start in starts
                )
                small.append(total // factor**2)
    return bytes(small)


@app.task(queue="images", time_limit=60)
def thumbnail(path: str, factor: int) -> str:
    """Write the thumbnail beside the picture; returns its path."""
    head, pixels = Path(path).read_bytes().split(b"\n", 1)
    width, height = (int(number) for number in head.split()[1:3])
    target = Path(path).with_suffix(".small.ppm")
    small = shrink(pixels, width, height, factor)
    target.write_bytes(b"P6 %d %d 255\n" % (width // factor, height // factor) + small)
    return str(target)
