"""Pictures of how things work, as SVG for a light and for a dark page.

``docs/conf.py`` calls :func:`write`; pages include ``_generated/diagram-NAME.md``. A picture is 360
units wide, so its text is as large as that of a page on a screen of 400 pixels.
"""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from benchmarks import numbers
from benchmarks.plot import THEMES, Theme, write_changed

WIDTH = 360
FONT = "font-family='-apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


class Picture:
    """Shapes with text, in the colors of a theme."""

    def __init__(self, theme: Theme):
        self.theme, self.shapes = theme, []

    def text(self, x, y, text: str, size=12, anchor="middle", bold=False) -> None:
        weight = " font-weight='600'" if bold else ""
        self.shapes.append(
            f"<text x='{x}' y='{y}' font-size='{size}' text-anchor='{anchor}' "
            f"fill='{self.theme.text}'{weight}>{escape(text)}</text>"
        )

    def box(self, x, y, width, height, lines: Sequence[str] = (), kind="", dashed=False) -> None:
        """A rectangle with centered lines. ``kind`` is "kernel" or "" (plain JAX)."""
        color = self.theme.kernel if kind == "kernel" else self.theme.reference
        dash = " stroke-dasharray='4 3'" if dashed else ""
        opacity = 0 if dashed else 0.25 if kind == "kernel" else 0.18
        self.shapes.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='5' fill='{color}' "
            f"fill-opacity='{opacity}' stroke='{color}' stroke-width='1.2'{dash}/>"
        )
        top = y + height / 2 - 7.5 * (len(lines) - 1) + 4
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 15 * number, line)

    def arrow(self, *points: tuple[float, float], label: str = "", at=(0, 0)) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.shapes.append(
            f"<polyline points='{path}' fill='none' stroke='{self.theme.text}' stroke-width='1.2' "
            "marker-end='url(#head)'/>"
        )
        if label:
            self.text(*at, label, size=11)

    def svg(self, height: int) -> str:
        head = (
            "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
            f"markerHeight='7' orient='auto'><path d='M0,0 L8,4 L0,8 z' fill='{self.theme.text}'/>"
            "</marker></defs>"
        )
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
            f"viewBox='0 0 {WIDTH} {height}' {FONT}>{head}{''.join(self.shapes)}</svg>\n"
        )


def block(picture: Picture) -> int:
    """A block of a transformer: its operations, and the ops in their place."""
    rows = [
        ("mean, subtract, square,|mean, rsqrt, multiply,|multiply, add", "layer_norm"),
        ("matrix product", ""),
        ("add the bias, cube, multiply,|add, tanh, add, multiply", "bias_act"),
        ("matrix product", ""),
        ("add the bias and the residual,|8 operations of a norm", "residual_|layer_norm"),
        (
            "product with the head, max,|subtract, exp, sum, log,|gather, mean",
            "linear_|cross_entropy",
        ),
    ]
    picture.text(100, 16, "the program", bold=True)
    picture.text(295, 16, "with autofuse", bold=True)
    y = 28
    for operations, op in rows:
        lines = operations.split("|")
        height = 15 * len(lines) + 15
        picture.box(2, y, 196, height, lines)
        after = (op or operations).split("|")
        picture.box(236, y, 120, height, after, "kernel" if op else "")
        picture.arrow((202, y + height / 2), (232, y + height / 2))
        y += height + 8
    return y


def chunks(picture: Picture) -> int:
    """The loss by chunks of tokens: only one part of the logits exists."""
    picture.text(40, 16, "tokens", bold=True)
    picture.text(222, 16, "logits, of all classes", bold=True)
    for number in range(4):
        y, now = 28 + 44 * number, number == 1
        picture.box(8, y, 64, 36, [f"chunk {number + 1}"], "kernel" if now else "")
        text = {0: "gone", 1: "in memory now: loss and gradients"}.get(number, "not yet computed")
        picture.box(96, y, 256, 36, [text], "kernel" if now else "", dashed=not now)
        picture.arrow((74, y + 18), (92, y + 18))
    picture.arrow((222, 206), (222, 226))
    picture.box(
        96,
        230,
        256,
        48,
        ["added up: the loss, the gradient of", "the table; joined: the gradient of x"],
    )
    return 286


def mesh(picture: Picture) -> int:
    """A layer norm on a mesh of two by two devices."""
    picture.text(180, 16, "layer_norm of x [8, 512, 1024] on a mesh of 2 x 2", bold=True)
    for row in range(2):
        for column in range(2):
            x, y = 58 + 152 * column, 48 + 82 * row
            rows, places = ("0-3", "4-7")[row], ("0-255", "256-511")[column]
            lines = [f"batch {rows}", f"sequence {places}", "kernel on whole rows"]
            picture.box(x, y, 146, 70, lines, "kernel")
    picture.text(131, 40, "sequence = 0", size=11)
    picture.text(283, 40, "sequence = 1", size=11)
    picture.text(52, 88, "data = 0", size=11, anchor="end")
    picture.text(52, 170, "data = 1", size=11, anchor="end")
    picture.text(180, 222, "Forward and the gradient of x: nothing is exchanged.")
    picture.text(180, 240, "Gradients of scale and bias: an all-reduce for each.")
    return 250


def choice(picture: Picture) -> int:
    """Which implementation a call takes."""
    questions = [
        ('Is the implementation "xla"?', "yes", "reference"),
        (
            "Does a kernel support the platform,|the dtype, the shape, the sharding?",
            "no",
            "reference",
        ),
        ('Is the implementation "native"?', "yes", "kernel"),
        (
            '"auto": was the kernel measured as|faster for this op, dtype and size?',
            "no",
            "reference",
        ),
    ]
    y = 6
    for question, answer, runs in questions:
        lines = question.split("|")
        height = 15 * len(lines) + 18
        middle, end = y + height / 2, y + height
        picture.box(4, y, 230, height, lines)
        picture.arrow((236, middle), (268, middle), label=answer, at=(251, middle - 5))
        picture.box(272, middle - 15, 84, 30, [runs], runs)
        other = {"yes": "no", "no": "yes"}[answer]
        picture.arrow((119, end + 2), (119, end + 22), label=other, at=(136, end + 15))
        y = end + 26
    picture.box(77, y, 84, 30, ["kernel"], "kernel")
    return int(y) + 36


# The kernels of a layer of BERT in their order: a label, a part of `numbers.LAUNCHES`, and a weight
# within the part. The weights of products are their operations.
STARTS = [("queries, keys, values", "products", 3), ("attention", "attention", 1)]
STARTS += [("output", "products", 1), ("norm", "norms", 1)]
ENDS = [("feed-forward, down", "products", 4), ("norm", "norms", 1)]
LAYERS = {
    "ours": [*STARTS, ("feed-forward, up; gelu", "activation", 1), *ENDS],
    "torch": [*STARTS, ("feed-forward, up", "products", 4), ("gelu", "activation", 1), *ENDS],
}


def layer(picture: Picture) -> int:
    """The kernels of a layer of BERT over time. The last box is what is not of one layer."""
    times, scale, top = numbers.sources(), 0.8, 24
    for us in range(0, 600, 100):
        picture.text(32, top + scale * us + 4, str(us) if us else "0 µs", 11, "end")
    for who, title, x in (("ours", "jax_fastops", 40), ("torch", "compiled PyTorch", 202)):
        kernels = LAYERS[who]
        picture.text(x + 77, 14, title, bold=True)
        y, end = top, top + scale * float(times[f"layer_{who}_all_us"])
        for label, part, weight in kernels:
            total = sum(w for _, p, w in kernels if p == part)
            height = scale * float(times[f"layer_{who}_{part}_us"]) * weight / total
            is_kernel = who == "ours" and part != "products"
            picture.box(x, round(y, 1), 154, round(height, 1), [label], "kernel" * is_kernel)
            y += height
        picture.box(x, round(y, 1), 154, round(end - y, 1))
        picture.text(x + 77, round(end) + 16, f"{times[f'layer_{who}_all_us']} µs", bold=True)
    return round(end) + 26


PICTURES: dict[str, tuple[Callable[[Picture], int], str]] = {
    "block": (block, "Operations of a transformer's block, and the ops that replace them"),
    "chunks": (chunks, "The loss is computed by chunks of tokens; one part of the logits exists"),
    "mesh": (mesh, "A layer norm on a mesh of two by two devices"),
    "layer": (layer, "Kernels of a layer of BERT over time: seven, and eight of compiled PyTorch"),
    "choice": (choice, "Which implementation a call takes"),
}


def write(folder: Path) -> None:
    """Writes the pictures, and a part of a page for each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (draw, alt) in PICTURES.items():
        part = ""
        for theme in THEMES:
            picture = Picture(theme)
            file = folder / f"diagram-{name}-{theme.name}.svg"
            write_changed(file, picture.svg(draw(picture)))
            part += (
                f"```{{image}} /_generated/{file.name}\n:class: only-{theme.name}\n:alt: {alt}\n"
                f":width: {WIDTH}px\n```\n\n"
            )
        write_changed(folder / f"diagram-{name}.md", part)
