# SPDX-License-Identifier: Apache-2.0
"""Configuration of the release notes' build."""

extensions = [
    'openstackdocstheme',
    'reno.sphinxext',
]

project = 'glance-dedup Release Notes'
copyright = 'The glance-dedup authors'
openstackdocs_repo_name = 'glance-dedup'
openstackdocs_auto_name = False
openstackdocs_pdf_link = False

# The release notes have no version of their own.
version = ''
release = ''

root_doc = 'index'
html_theme = 'openstackdocs'
pygments_style = 'native'
