# SPDX-License-Identifier: Apache-2.0

"""Mutation testing measures whether the tests detect wrong code.

``tools/mutate`` runs this package. ``operators.py`` finds the small changes
that can be made to a source file. ``suite.py`` finds the tests and the lines
that they execute, and runs them on a changed copy of the tree. ``__main__.py``
chooses changes, tries them and reports.
"""
