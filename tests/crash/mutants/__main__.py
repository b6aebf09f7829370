# SPDX-License-Identifier: Apache-2.0

"""Lists the mutants, or makes the tree of one."""

import pathlib
import shutil
import subprocess
import sys

from tests.crash import mutants
from tests.crash.mutants import mutant_trees


def main(arguments: list[str]) -> None:
    if not arguments:
        for mutant in mutants.MUTANTS:
            print(f'{mutant.name:40} {mutant.rule:10} '
                  f'{mutant.workload or mutant.why_not}')
        return
    name, directory = arguments
    mutant, = [mutant for mutant in mutants.MUTANTS if mutant.name == name]
    tree = pathlib.Path(directory).resolve()
    objects = tree.with_name(tree.name + '-objects')
    objects.mkdir()
    try:
        mutant_trees.Builder(objects).build(mutant, tree)
    except subprocess.CalledProcessError as e:
        print(e.stderr, file=sys.stderr)
        raise
    finally:
        shutil.rmtree(objects)


if __name__ == '__main__':
    main(sys.argv[1:])
