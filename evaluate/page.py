"""Pages, tables in a terminal and sentences: Jinja templates over what a command found.

A page is one self-contained HTML file: no script, no fetch.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from dynamiccl import cli
from dynamiccl.sizes import bin_center_bytes, size_label
from dynamiccl.train.options import wide_stdout


def render(name: str, told: Mapping[str, Any]) -> str:
    """The text that the template NAME.jinja makes."""
    return _environment(is_page=name.endswith(".html")).get_template(f"{name}.jinja").render(told)


def say(name: str, sentence: str, told: object) -> str:
    """The text of a macro of the template NAME.words.jinja."""
    template = _environment(is_page=False).get_template(f"{name}.words.jinja")
    return str(getattr(template.module, sentence)(told)).strip()


def show_result(name: str, told: Mapping[str, Any], document: object, *, as_json: bool) -> None:
    """Print what the template NAME.txt.jinja makes of `told`, or the `document` as JSON."""
    if as_json:
        cli.print_json(document)
        return
    text = render(f"{name}.txt", told).rstrip()
    wide_stdout().print(text, soft_wrap=True, highlight=False, markup=False)


def write_page(out: Path, page: str, data: Any, told: Mapping[str, Any]) -> Path:
    """Write `page`.json, `data`, and `page`.html into `out`; returns the path of the latter.

    The page's template has what `told` holds.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{page}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    path = out / f"{page}.html"
    path.write_text(render(f"{page}.html", told), encoding="utf-8")
    return path


@cache
def _environment(*, is_page: bool) -> jinja2.Environment:
    folder = resources.files("dynamiccl.evaluate")
    environment = jinja2.Environment(
        autoescape=is_page,
        undefined=jinja2.StrictUndefined,
        trim_blocks=not is_page,
        lstrip_blocks=not is_page,
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
    )
    environment.filters |= {
        "percent": percent,
        "saved": saved_text,
        "size": size_label,
        "bin_size": lambda index: size_label(bin_center_bytes(index)),
        # From NCCL's own time / another - 1 to the share that the other saves.
        "less": lambda gain: gain / (1.0 + gain),
        "commit": _commit_text,
    }
    return environment


def _commit_text(commit: str | None) -> str:
    """Abbreviated commit, and whether the source was modified."""
    digest, plus, changed = (commit or "not known").partition("+")
    return digest[:12] + plus + changed


def percent(fraction: float) -> str:
    """A share in words.

    >>> percent(0.404), percent(0.0123), percent(0.0)
    ('40 %', '1.2 %', '0 %')
    """
    value = 100.0 * fraction
    return f"{value:.0f} %" if value >= 9.95 or value == 0.0 else f"{value:.1f} %"


def saved_text(mean: float, interval: Sequence[float] | None = None) -> str:
    """Time saved and its interval in per cent, for a table; below 0 is more time.

    >>> saved_text(0.1, [0.05, 0.152]), saved_text(-0.004)
    ('10.0 (5.0 to 15.2)', '-0.4')
    """
    first, *ends = (f"{round(100.0 * each, 1) + 0.0:.1f}" for each in (mean, *(interval or ())))
    return f"{first} ({' to '.join(ends)})" if ends else first
