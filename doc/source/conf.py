# Licensed under the Apache License, Version 2.0 (the "License"); you may
# not use this file except in compliance with the License. You may obtain
# a copy of the License at
#
#      http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
# WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
# License for the specific language governing permissions and limitations
# under the License.
"""Configuration of the documentation's build."""

extensions = [
    'openstackdocstheme',
    'oslo_config.sphinxext',
    'oslo_config.sphinxconfiggen',
    'cliff.sphinxext',
    'sphinx.ext.autodoc',
]

project = 'glance-dedup'
copyright = 'The glance-dedup authors'
openstackdocs_repo_name = 'glance-dedup'
openstackdocs_auto_name = False
openstackdocs_use_storyboard = False
openstackdocs_pdf_link = False

root_doc = 'index'
source_suffix = {'.rst': 'restructuredtext'}
exclude_patterns = []
add_function_parentheses = True
add_module_names = False
modindex_common_prefix = ['glance_dedup.']
autodoc_member_order = 'bysource'
pygments_style = 'native'

html_theme = 'openstackdocs'

config_generator_config_file = [
    ('../../etc/oslo-config-generator/glance-dedup.conf',
     'configuration/glance-dedup'),
    ('../../etc/oslo-config-generator/dedupd.conf', 'configuration/dedupd'),
]

autoprogram_cliff_application = 'glance-dedup'
