# SPDX-License-Identifier: Apache-2.0

"""The protocol as a model, which Spin checks.

``protocol.pml`` and the files that it includes are the model, in Promela.
``scenarios.py`` says what is tried: who takes part, what may happen, and where
a rule that is left out must be noticed. ``checker.py`` runs Spin.
"""
