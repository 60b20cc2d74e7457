"""Writes two events with TensorBoard's own writer: `pip install tensorboard`, then `events.py OUT`."""
import io
import sys

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

NOW = 1_700_000_000.5
scalar = Summary.Value(tag="train/loss", simple_value=2.5)
events = [
    Event(wall_time=NOW, file_version="brain.Event:2"),
    Event(wall_time=NOW, step=300, summary=Summary(value=[scalar])),
]
file = io.BytesIO()
writer = RecordWriter(file)
for event in events:
    writer.write(event.SerializeToString())
open(sys.argv[1], "wb").write(file.getvalue())
