"""``clawgym view``: one local web application over runs, pools, trainings, leaderboards and what runs now."""
