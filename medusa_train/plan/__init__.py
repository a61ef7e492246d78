"""What a run will need: parameters, memory, work, disk and time, before a weight is loaded."""
