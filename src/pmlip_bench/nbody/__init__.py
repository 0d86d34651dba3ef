"""The paper's first benchmark: where five charged particles are after a thousand steps."""
