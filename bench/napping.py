"""Agent that sleeps between its turns. Like a user's agent, it imports nothing of Rheostat."""

import json
import time
import urllib.request


def nap(problem, base_url, api_key, turns):
    """Request `turns` turns, and sleep before each but the first for `mean_seconds`, which is a column of the
    problem."""
    for turn in range(turns):
        if turn:
            time.sleep(problem["mean_seconds"])
        body = json.dumps({"prompt": f"{problem['prompt']} {turn}"}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{base_url}/completions", body, headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            answer.read()
