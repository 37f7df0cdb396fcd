"""What operators look at: the dashboard, the alarms, and the live view of a terminal."""
