# SPDX-License-Identifier: Apache-2.0
"""Configuration of the release notes' build."""

extensions = [
    'reno.sphinxext',
]

project = 'glance-dedup Release Notes'
copyright = 'The glance-dedup authors'

# The release notes have no version of their own.
version = ''
release = ''

root_doc = 'index'

# The style of the theme itself starts logging when it is imported.
pygments_style = 'default'
pygments_dark_style = 'monokai'

html_theme = 'furo'
