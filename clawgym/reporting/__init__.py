"""Parts of reports: charts and screenshots."""
