# SPDX-License-Identifier: Apache-2.0

"""Line and bar charts, as SVG: ``--plot FILE`` of the benchmarks.

They need matplotlib (``benchmarks/requirements.txt``); without it the
benchmark fails at its start, not after its run: call :func:`argument`. The
same figures give the same bytes. The charts are for a width of 800 pixels;
colour-blind readers can distinguish the colours, and the lines by their marks,
too.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import importlib.util
import os
from typing import Any

#: Okabe and Ito's, without the yellow, which is too light for a line.
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#56b4e9', '#e69f00',
           '#000000')
MARKS = 'osD^vPX'
STYLE = {
    'svg.hashsalt': 'glance-dedup',  # identifiers by content, not at random
    'svg.fonttype': 'none',
    'font.family': 'sans-serif',
    'font.size': 11,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'axes.axisbelow': True,
    'grid.color': '#dddddd',
    'legend.frameon': False,
}


def argument(parser: argparse.ArgumentParser, what: str = 'FILE') -> None:
    """Add ``--plot``."""
    def usable(path: str) -> str:
        if importlib.util.find_spec('matplotlib') is None:
            raise argparse.ArgumentTypeError(
                'matplotlib is not installed; see benchmarks/requirements.txt')
        if what == 'DIR':
            os.makedirs(path, exist_ok=True)
        return path
    parser.add_argument('--plot', metavar=what, type=usable,
                        help='draw the figures, too, as SVG')


@contextlib.contextmanager
def _axes(title: str, path: str, height: float) -> Iterator[Any]:
    """Yield the axes of a chart, which is written at the end."""
    import matplotlib
    from matplotlib import figure
    with matplotlib.rc_context(STYLE):
        chart = figure.Figure(figsize=(8, height), dpi=100,
                              layout='constrained')
        axes = chart.add_subplot()
        axes.set_title(title, loc='left', fontweight='bold')
        yield axes
        chart.savefig(path, format='svg', metadata={'Date': None})


def lines(series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
          x: str, y: str, title: str, path: str, *, log_x: bool = False,
          log_y: bool = False) -> None:
    """Draw lines.

    :param series: by name: places on the x axis, and figures
    :param x: the values on the x axis, with their unit; so for ``y``, which
        starts at 0 unless it is logarithmic
    """
    with _axes(title, path, 4.5) as axes:
        for i, (name, (places, figures)) in enumerate(series.items()):
            axes.plot(places, figures, label=name, linewidth=1.8,
                      color=COLOURS[i % len(COLOURS)],
                      marker=MARKS[i % len(MARKS)], markersize=4.5,
                      linestyle='-' if i < len(COLOURS) else '--')
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if log_x:
            axes.set_xscale('log')
        if log_y:
            axes.set_yscale('log')
        else:
            axes.set_ylim(bottom=0)
        if len(series) > 1:
            axes.legend()


def bars(groups: Sequence[str], series: Mapping[str, Sequence[float | None]],
         y: str, title: str, path: str, *, digits: int = 1) -> None:
    """Draw horizontal bars, which leave room for names, with their figures.

    :param groups: the compared subjects, from top to bottom
    :param series: by name: a figure for each group, or None where there is
        none; several are drawn beside one another
    :param y: the meaning of the figures, with the unit
    """
    thick = 0.8 / len(series)
    count = len(groups) * len(series)
    with _axes(title, path, 1.3 + 0.32 * max(count, 5)) as axes:
        for i, (name, figures) in enumerate(series.items()):
            found = [(place, figure) for place, figure in enumerate(figures)
                     if figure is not None]
            drawn = axes.barh(
                [place + (i - (len(series) - 1) / 2) * thick
                 for place, _ in found], [figure for _, figure in found],
                thick * 0.92, label=name, color=COLOURS[i % len(COLOURS)])
            axes.bar_label(drawn, [f'{figure:,.{digits}f}'
                                   for _, figure in found], padding=3)
        axes.set_yticks(range(len(groups)), groups)
        axes.set_ylim(len(groups) - 0.4, -0.6)
        axes.margins(x=0.1)
        axes.set_xlabel(y)
        axes.grid(visible=False, axis='y')
        if len(series) > 1:
            axes.legend()
