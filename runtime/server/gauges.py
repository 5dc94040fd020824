"""What the metrics show of the scheduler, the thread that runs it, and the prompts on disk."""

from __future__ import annotations

from edgeq.runtime.batching.base_scheduler import BaseScheduler
from edgeq.runtime.batching.prompt_store import PromptStore
from edgeq.runtime.server.owner import Owner
from edgeq.runtime.stats import Speculation


def tokens_of(scheduler: BaseScheduler, drafts: Speculation) -> dict[str, float]:
    totals = scheduler.totals
    return {
        "prompt": totals.prompt_tokens,
        "cached": totals.cached_tokens,
        "generated": totals.generated_tokens,
        "recomputed": totals.recomputed_tokens,
        "drafted": sum(drafts.drafted),
        "accepted": sum(drafts.accepted),
    }


def gauges_of(scheduler: BaseScheduler, owner: Owner, store: PromptStore | None) -> dict[str, float]:
    free, held, idle = scheduler.pages
    return {
        "running": scheduler.running,
        "waiting": scheduler.waiting,
        "pages_free": free,
        "pages_held": held,
        "pages_idle": idle,
        "preemptions": scheduler.totals.preemptions,
        "heartbeat_age_seconds": owner.heartbeat_age,
        "prompt_cache_bytes": store.bytes if store else 0,
        "prompt_cache_errors": store.errors if store else 0,
    }
