"""pmlip bench: the commands of the package pmlip_bench."""

try:
    from pmlip_bench.cli import bench
except ModuleNotFoundError as error:
    raise ImportError(f"the benchmarks need {error.name}: pip install 'pmlip[bench]'") from error

__all__ = ["bench"]
