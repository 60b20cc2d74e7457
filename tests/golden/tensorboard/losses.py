"""Prints steps and losses of a folder of event files, as TensorBoard reads them: `pip install tensorboard`, then `losses.py RUN/tb`."""
import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
print(json.dumps([(scalar.step, scalar.value) for scalar in events.Scalars("train/loss")]))
