"""plan_digest(): a short name of a plan's contents, by which two processes compare their plans."""

import hashlib
import json

from headroom.plan.plan import Plan
from headroom.plan.show.report import plan_json


def plan_digest(plan: Plan) -> str:
    """Return a digest of every line and setting of a plan."""
    text = json.dumps(plan_json(plan), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
