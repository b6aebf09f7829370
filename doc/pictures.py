# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README and of the design page.

::

    python doc/pictures.py

writes ``doc/source/images/*.svg``. Each has a background of its own, and
colours for light and dark, so it can be read wherever it is shown. Text is
text: it can be searched, selected and read aloud.
"""

import pathlib
from xml.sax import saxutils

IMAGES = pathlib.Path(__file__).resolve().parent / 'source' / 'images'

_STYLE = """
    svg { color-scheme: light dark; }
    .ground { fill: #ffffff; }
    .frame { fill: #f4f6f8; stroke: #8794a3; stroke-dasharray: 5 4; }
    .program { fill: #dbeafe; stroke: #1d4ed8; }
    .store { fill: #fef3c7; stroke: #b45309; }
    .other { fill: #ffffff; stroke: #4b5563; }
    .line { stroke: #374151; stroke-width: 1.6; fill: none; }
    .tip { fill: #374151; }
    text { font-family: sans-serif; font-size: 13px; fill: #111827; }
    .name { font-weight: bold; font-size: 14px; }
    .label { font-size: 12px; fill: #374151; }
    .folder { font-size: 12px; font-style: italic; fill: #374151; }
    @media (prefers-color-scheme: dark) {
      .ground { fill: #0d1117; }
      .frame { fill: #161b22; stroke: #6e7b8b; }
      .program { fill: #14294d; stroke: #7aa7ff; }
      .store { fill: #3d2c0a; stroke: #f0b849; }
      .other { fill: #0d1117; stroke: #9aa5b1; }
      .line { stroke: #c2cad3; }
      .tip { fill: #c2cad3; }
      text { fill: #f0f3f6; }
      .label, .folder { fill: #c2cad3; }
    }
"""


class Picture:
    """Boxes with text, and arrows between them."""

    def __init__(self, width: int, height: int, title: str, what: str) -> None:
        self._lines = [
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="title what">',
            f'  <title id="title">{saxutils.escape(title)}</title>',
            f'  <desc id="what">{saxutils.escape(what)}</desc>',
            f'  <style>{_STYLE}  </style>',
            '  <defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" '
            'markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
            '<path class="tip" d="M0 0 10 5 0 10z"/></marker></defs>',
            f'  <rect class="ground" width="{width}" height="{height}"/>']

    def text(self, x: int, y: int, words: str, kind: str = '',
             anchor: str = 'middle') -> None:
        shape = f' class="{kind}"' if kind else ''
        self._lines.append(
            f'  <text{shape} x="{x}" y="{y}" text-anchor="{anchor}">'
            f'{saxutils.escape(words)}</text>')

    def frame(self, x: int, y: int, width: int, height: int,
              name: str) -> None:
        self._rectangle('frame', x, y, width, height)
        self.text(x + 14, y + 22, name, 'name', 'start')

    def box(self, kind: str, x: int, y: int, width: int, height: int,
            name: str, *lines: str, folder: str = '') -> None:
        """A name in bold, and lines below it, in the middle of a box."""
        self._rectangle(kind, x, y, width, height)
        rows = [(name, 'name')] * bool(name)
        rows += [(line, '') for line in lines]
        if folder:
            rows.append((folder, 'folder'))
        top = y + (height - 18 * len(rows)) // 2 + 14
        for number, (words, shape) in enumerate(rows):
            self.text(x + width // 2, top + 18 * number, words, shape)

    def arrow(self, x1: int, y1: int, x2: int, y2: int, words: str = '',
              at: tuple[int, int] | None = None, both: bool = False) -> None:
        start = ' marker-start="url(#tip)"' if both else ''
        self._lines.append(
            f'  <path class="line" d="M{x1} {y1} {x2} {y2}"{start} '
            'marker-end="url(#tip)"/>')
        if words:
            x, y = at or ((x1 + x2) // 2, (y1 + y2) // 2 - 7)
            self.text(x, y, words, 'label')

    def _rectangle(self, kind: str, x: int, y: int, width: int,
                   height: int) -> None:
        self._lines.append(
            f'  <rect class="{kind}" x="{x}" y="{y}" width="{width}" '
            f'height="{height}" rx="7"/>')

    def __str__(self) -> str:
        return '\n'.join([*self._lines, '</svg>', ''])


def overview() -> Picture:
    """Draw which program connects to which."""
    p = Picture(
        920, 430, 'Glance, the store, the daemon, the cache and Nova',
        'Users upload images to Glance. The store inside Glance writes each '
        'new block into the repository. The daemon dedupd maintains the '
        'repository and serves reads. On a compute host Nova asks a cache, '
        'which asks Glance for permission and fetches only the blocks that '
        'it lacks.')
    p.frame(150, 15, 400, 400, 'Storing host (one, or several)')
    p.frame(660, 15, 245, 400, 'Compute host')
    p.box('other', 12, 75, 78, 60, 'Users')
    p.box('other', 170, 55, 360, 115, '')
    p.text(350, 78, 'Glance, API workers', 'name')
    p.box('program', 185, 92, 330, 64, 'store (dedup)',
          'cuts, fingerprints, looks up, compresses')
    p.box('program', 310, 215, 205, 80, 'dedupd', 'collects, merges, scrubs,',
          'serves reads')
    p.box('store', 185, 345, 330, 58, 'repository',
          'each distinct block once; a recipe per image')
    p.box('other', 680, 55, 205, 60, 'Nova', 'starts servers')
    p.box('program', 680, 205, 205, 80, 'cache (dedupd)',
          'fetches missing blocks,', 'verifies the whole image')
    p.box('store', 680, 345, 205, 58, 'repository', 'of this cache')
    p.arrow(90, 105, 168, 105, 'upload', (119, 97))
    p.arrow(225, 156, 225, 343, 'new blocks', (267, 255))
    p.arrow(412, 215, 412, 158, 'reads', (436, 197))
    p.arrow(412, 297, 412, 343, both=True)
    p.arrow(530, 80, 678, 80, 'images', (605, 72))
    p.arrow(678, 215, 532, 140, 'may I?', (620, 165))
    p.arrow(515, 260, 678, 260, 'missing blocks', (605, 252))
    p.arrow(782, 205, 782, 117, 'images', (812, 165))
    p.arrow(782, 287, 782, 343, both=True)
    return p


def life() -> Picture:
    """Draw the path of an image through the folders of the engine."""
    p = Picture(
        920, 420, 'The life of an image',
        'Above: upload, cut, fingerprint, look up, store, commit. In the '
        'middle: the filter in memory, and the repository with its catalog, '
        'its block groups and its recipes. Below: collect, merge, delete and '
        'read. In italics the folder of the engine.')
    steps = [('upload', 'from Glance', ''),
             ('cut', 'into blocks', 'format'),
             ('fingerprint', 'in batches', 'write'),
             ('look up', 'hint, then proof', 'write'),
             ('store', 'what is new', 'write'),
             ('commit', 'link the recipe', 'write')]
    for number, (name, line, folder) in enumerate(steps):
        x = 20 + 150 * number
        kind = 'program' if folder else 'other'
        p.box(kind, x, 20, 126, 72, name, line, folder=folder)
        if number:
            p.arrow(x - 24, 56, x - 2, 56)
    p.box('store', 130, 150, 170, 74, 'filter', 'hints, in memory',
          folder='files')
    p.frame(350, 150, 550, 120, 'repository')
    p.box('store', 368, 178, 150, 76, 'catalog', 'counts, exact index')
    p.box('store', 538, 178, 170, 76, 'groups', 'blocks, fingerprints',
          folder='files')
    p.box('store', 728, 178, 150, 76, 'images', 'recipes', folder='files')
    p.arrow(492, 92, 302, 160)
    p.arrow(545, 92, 580, 176)
    p.arrow(660, 92, 640, 176)
    p.arrow(815, 92, 805, 176)
    ends = [('collect', 'frees blocks', 'maintain'),
            ('merge', 'finds duplicates', 'maintain'),
            ('delete', 'takes the name', 'files'),
            ('read', 'verifies all', 'read')]
    for number, (name, line, folder) in enumerate(ends):
        x = 350 + 141 * number
        p.box('program', x, 325, 127, 76, name, line, folder=folder)
        if name == 'read':
            p.arrow(x + 63, 270, x + 63, 323)
        else:
            p.arrow(x + 63, 325, x + 63, 272)
    p.text(40, 350, 'Blue: what is done.', 'label', 'start')
    p.text(40, 370, 'Yellow: what is kept.', 'label', 'start')
    p.text(40, 390, 'Italics: the folder of the engine.', 'label', 'start')
    return p


PICTURES = {'overview': overview, 'life': life}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / f'{name}.svg').write_text(str(draw()))


if __name__ == '__main__':
    main()
