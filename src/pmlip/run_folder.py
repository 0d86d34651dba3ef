"""The folder of a fine-tuning run."""

from pathlib import Path

MODEL_FILE = "model.pt"
SUMMARY_FILE = "summary.json"  # of a finished run


def model_file(path: str | Path) -> Path:
    """The model file that a path names: the file itself, or the model in the folder of a run."""
    path = Path(path)
    if not path.is_dir():
        return path
    if not (path / MODEL_FILE).exists():
        raise FileNotFoundError(
            f"the folder {path} holds no {MODEL_FILE}: if it is the folder of an unfinished run, finish it by the same "
            "`pmlip finetune` command, otherwise give a model file"
        )
    return path / MODEL_FILE
