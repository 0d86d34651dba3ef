"""What a fine-tuning gives."""

from dataclasses import asdict, dataclass, field

from pmlip.provenance import History, environment
from pmlip.training.config import FinetuneConfig


@dataclass(frozen=True)
class Finetuned:
    """Summary of a run. For a model of several parts: values of the first part, with the total cost of all."""

    steps: int
    passes: int  # forward and backward passes: structures times samples
    validation: dict[str, float]  # scores of the kept weights: "valid", and by label; empty without validation data
    offsets: dict[int, float]  # eV per atom by atomic number, added to the reference energies of the backbone
    scales: dict[str, float]  # mean absolute error of each label before fine-tuning
    noise_rate: float  # learning rate of the parameters that the method adds
    log: list[dict[str, float]] = field(repr=False)
    seconds: float = 0.0

    def history(self, config: FinetuneConfig) -> History:
        """The history to store in the model file."""
        scores = {"score" if name == "valid" else name.removeprefix("valid_"): x for name, x in self.validation.items()}
        run_on = environment()
        return History(
            config=asdict(config),
            energy_offsets=config.offsets,
            steps=self.steps,
            passes=self.passes,
            seconds=round(self.seconds, 1),
            offsets=self.offsets,
            error_before=self.scales,
            noise_rate=self.noise_rate,
            validation=scores,
            validation_curve=[line for line in self.log if "valid" in line],
            versions=run_on["versions"],
            machine=run_on["machine"],
        )
