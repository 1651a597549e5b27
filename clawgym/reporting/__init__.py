"""What reports are made of: charts and pictures."""
