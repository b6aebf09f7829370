# SPDX-License-Identifier: Apache-2.0
"""Configuration of the documentation's build."""

import pathlib
import re
import sys

from cliff import sphinxext
from docutils import nodes

from glance_dedup.base import package_version
from glance_dedup.cli import entry

_TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_TOP / 'doc'))

extensions = [
    'module_map',
    'oslo_config.sphinxext',
    'oslo_config.sphinxconfiggen',
    'cliff.sphinxext',
    'reno.sphinxext',
    'sphinx.ext.autodoc',
]

project = 'glance-dedup'
copyright = 'The glance-dedup authors'
version = release = package_version.version()

root_doc = 'index'
source_suffix = {'.rst': 'restructuredtext'}
exclude_patterns = []
# reno asks git, or the cache that an sdist has. A plain copy has no changelog.
if not any((_TOP / name).exists()
           for name in ('.git', 'releasenotes/notes/reno.cache')):
    exclude_patterns.append('changelog.rst')
    suppress_warnings = ['toc.excluded']
add_function_parentheses = True
add_module_names = False
modindex_common_prefix = ['glance_dedup.']
autodoc_member_order = 'bysource'

# Most literal blocks are commands of a shell or excerpts of files.
highlight_language = 'none'
# The style of the theme itself starts logging when it is imported.
pygments_style = 'default'
pygments_dark_style = 'monokai'

html_theme = 'furo'

man_pages = [
    ('cli/glance-dedup', 'glance-dedup',
     'work on a repository of the deduplicating image store',
     'The glance-dedup authors', 1),
    ('cli/dedupd', 'dedupd',
     'maintainer and read cache of the deduplicating image store',
     'The glance-dedup authors', 8),
]

config_generator_config_file = [
    ('../../etc/oslo-config-generator/glance-dedup.conf',
     'configuration/glance-dedup'),
    ('../../etc/oslo-config-generator/dedupd.conf', 'configuration/dedupd'),
]

autoprogram_cliff_application = 'glance-dedup'


def _with_default(format_action):
    """As `format_action`, with %(default)s filled in, as --help has it."""
    def format_with_default(action):
        if action.help:
            action.help = action.help % {**vars(action), 'prog': ''}
        return format_action(action)
    return format_with_default


def _unlink(app, doctree, docname):
    """In a manual page a reference is words: there is nothing to lead to."""
    if app.builder.name == 'man':
        for reference in list(doctree.findall(nodes.reference)):
            if reference.get('internal'):
                reference.replace_self(reference.children)


def _lead_to_pages(app, doctree, docname):
    """Have pages of the checkout's top lead to pages, not to their sources."""
    for reference in doctree.findall(nodes.reference):
        name = reference.get('refuri', '')
        if match := re.fullmatch(r'doc/source/([\w/-]+)\.rst', name):
            target = match[1]
        elif match := re.fullmatch(r'([A-Z]+)\.rst', name):
            target = f'contributor/{match[1].lower()}'
        else:
            continue
        reference['refuri'] = app.builder.get_relative_uri(docname, target)


def setup(app):
    # cliff prints the help as the code has it.
    sphinxext._format_optional_action = _with_default(
        sphinxext._format_optional_action)
    # cliff's own manager finds commands by entry points; there are none.
    sphinxext.commandmanager = entry
    app.connect('doctree-resolved', _lead_to_pages)
    app.connect('doctree-resolved', _unlink)
