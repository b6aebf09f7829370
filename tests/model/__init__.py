# SPDX-License-Identifier: Apache-2.0

"""The protocol as a model, which Spin checks.

``protocol.pml`` and the files that it includes are the model, in Promela.
``scenarios.py`` lists the scenarios: the processes, the events, and the
scenario in which the lack of a rule must be noticed. ``checker.py`` runs Spin.
"""
