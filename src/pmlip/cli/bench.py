"""pmlip bench: the commands of the package pmlip_bench."""

try:
    from pmlip_bench.cli import bench
except ModuleNotFoundError as error:
    raise ImportError("the benchmarks need: pip install 'pmlip[bench]'") from error

__all__ = ["bench"]
