"""What a run tells: its directory, its metrics, its lines on the console."""
