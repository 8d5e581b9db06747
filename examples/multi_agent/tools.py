"""The tool of planner_worker: what things cost today."""


def price(item, episode):
    """The price in the episode's shop."""
    return str(episode.task["extra_info"]["prices"][item])
