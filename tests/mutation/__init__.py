# SPDX-License-Identifier: Apache-2.0

"""Mutation testing: do the tests notice when the code is wrong?

``tools/mutate`` runs this package. ``operators.py`` finds the small changes
that can be made to a source file. ``suite.py`` knows the tests, what they
execute, and how to run them on a changed copy of the tree. ``__main__.py``
chooses changes, tries them and reports.
"""
