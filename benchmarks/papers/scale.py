# SPDX-License-Identifier: Apache-2.0

"""Compute the requirements of backups of 100 and of 10,000 hosts.

Run it from a checkout::

    python benchmarks/papers/scale.py [--hosts N ...] [--FIGURE VALUE ...]

It multiplies measured figures; nothing is stored, and no host is used. It
prints the figures with their origins, then the sums of a night, and then the
required share of each resource, the scarcest first.
"""

import argparse
import dataclasses

import _path  # noqa: F401  finds the modules beside it
import common  # noqa: F401  finds the packages beside it

from glance_dedup.backup import rank_exchange

#: The memory limit of a rank, in MB.
MEMORY = 35
#: The maximum of ranks in a job.
RANKS = 4096
BLOCK = 4096
RECORD = 13
#: All ranks send to all, in the stages 1a, 2a, 3a and 4a.
EXCHANGES = 4


def figure(value: float, unit: str, origin: str):
    """Return a figure that goes into the sums."""
    return dataclasses.field(
        default=value, metadata={'unit': unit, 'origin': origin})


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures behind the sums."""

    disks: float = figure(25, 'for each host', "the paper's cloud")
    disk_gb: float = figure(40, 'GB', "the paper's cloud")
    dirty: float = figure(22, '% of segments', "the paper's cloud")
    asked: float = figure(
        10, '% of dirty blocks', 'assumed: not as in the base')
    new: float = figure(50, '% of asked blocks', 'assumed')
    rate_mb: float = figure(
        100, 'MB/s of a host', 'plan of backup run; the paper: 88')
    cpu_gb: float = figure(
        1.76, 'GB/s of a processor',
        'benchmarks/papers/batch.py nights --ranks 1: working')
    exchanged: float = figure(
        6.2, 'M records/s', 'the exchange alone, ranks on one host')
    merged: float = figure(
        0.115, 'M blocks/s', 'a whole merging task, one maintainer')
    shard_mb: float = figure(12, 'MB', 'design: sort and join in memory')
    rank_mb: float = figure(
        29.6, 'MB without send buffers',
        'benchmarks/papers/batch.py nights --ranks 2: nights 2 and 3')
    shared_gb: float = figure(
        1.25, 'GB/s of the shared directory', 'assumed: 10 Gbit/s')
    kept: float = figure(30, 'nights of new blocks', 'assumed: retention')
    night: float = figure(8, 'hours', 'assumed')
    failing: float = figure(
        20000, 'hours between failures of a host', 'assumed')


def night(figures: Figures, hosts: int) -> dict[str, float]:
    """Return the sums of one night."""
    size = figures.disks * figures.disk_gb * 1e9
    dirty = hosts * size * figures.dirty / 100
    asked = dirty / BLOCK * figures.asked / 100
    new = asked * figures.new / 100
    # After the first night: one unique tenth of all disks, and each night's.
    unique = hosts * size / 10 / BLOCK + new * figures.kept
    index = unique * RECORD
    pairs = hosts * (hosts - 1)
    buffer = rank_exchange.buffer_of(hosts)
    # A request and its answer, and a reference of each stored block.
    sent = (2 * asked + new) * RECORD
    reading = dirty / hosts * (
        1 + figures.asked * figures.new / 1e4) / (figures.rate_mb * 1e6)
    return {
        'hosts': hosts, 'virtual TB': hosts * size / 1e12,
        'dirty TB': dirty / 1e12, 'requests, M': asked / 1e6,
        'new blocks, M': new / 1e6, 'new TB': new * BLOCK / 1e12,
        'sent between hosts, GB': sent / 1e9,
        'messages, M': (EXCHANGES * pairs * 2 + sent / buffer) / 1e6,
        'index GB': index / 1e9,
        'index shards': index / (figures.shard_mb * 1e6),
        'recipes': hosts * figures.disks,
        'reading, h': reading / 3600,
        'processor of a host, h': dirty / hosts / (
            figures.cpu_gb * 1e9) / 3600,
        'exchange, h': asked / hosts / (
            figures.exchanged * 1e6) / 3600,
        'shared directory, h': (new * BLOCK + 2 * index) / (
            figures.shared_gb * 1e9) / 3600,
        'merging, h': new / (figures.merged * 1e6) / 3600,
        # Each buffer, and as much under way.
        'memory of a rank, MB': figures.rank_mb + 2 * hosts * buffer / 1e6,
    }


def shares(figures: Figures, sums: dict[str, float]) -> dict[str, float]:
    """Return the required share of each resource."""
    hosts = sums['hosts']
    return dict(sorted({
        f'ranks of one job ({RANKS})': hosts / RANKS,
        f'memory of a rank ({MEMORY} MB)':
            sums['memory of a rank, MB'] / MEMORY,
        f'reading in the night ({figures.night:g} h)':
            sums['reading, h'] / figures.night,
        f'the shared directory in the night ({figures.night:g} h)':
            sums['shared directory, h'] / figures.night,
        'merging in a day (24 h)': sums['merging, h'] / 24,
        'hosts that fail while a job runs (1)':
            hosts * sums['reading, h'] / figures.failing,
    }.items(), key=lambda item: -item[1]))


def number(value: float) -> str:
    """Format three digits, for people."""
    return f'{value:,.0f}' if value >= 100 else f'{value:.3g}'


def report(figures: Figures, hosts: list[int]) -> list[str]:
    """Return all tables, line by line."""
    lines = []
    for field in dataclasses.fields(figures):
        lines.append(f'{field.name:10}'
                     f'{number(getattr(figures, field.name)):>7} '
                     f'{field.metadata["unit"]:33}'
                     f'{field.metadata["origin"]}')
    nights = [night(figures, count) for count in hosts]
    lines.append('')
    for name in nights[0]:
        lines.append(f'{name:26}' + ''.join(
            f'{number(sums[name]):>12}' for sums in nights))
    for sums in nights:
        lines += ['', f'{number(sums["hosts"])} hosts']
        lines += [f'  {name:46}{share:8.2f}'
                  for name, share in shares(figures, sums).items()]
    return lines


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--hosts', type=int, nargs='+',
                        default=[100, 10000])
    for field in dataclasses.fields(Figures):
        parser.add_argument(
            f'--{field.name.replace("_", "-")}', type=float,
            default=field.default, help=field.metadata['unit'].replace(
                '%', '%%'))
    options = vars(parser.parse_args())
    hosts = options.pop('hosts')
    print('\n'.join(report(Figures(**options), hosts)))


if __name__ == '__main__':
    main()
