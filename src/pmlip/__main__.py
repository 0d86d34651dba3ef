"""python -m pmlip, which is what torchrun starts."""

from pmlip.cli import app

if __name__ == "__main__":
    app(prog_name="pmlip")
