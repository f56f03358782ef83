"""Top-level names that Hermes 0.19.0 is known to make in its home.

A name that is not here stays local like most of these do; status tells it once, so that a person
notices what a newer version or a plugin began to keep.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_NAMES_TEXT = """
    SOUL.md memories skills workspace config.yaml state.db state.db-wal state.db-shm
    state.db-journal skill-bundles optional-skills skins pets hooks scripts dashboard-themes plans
    kanban kanban.db projects.db response_store.db memory_store.db verification_evidence.db cron
    sessions session-exports channel_directory.json channel_aliases.json sticker_cache.json
    gateway_voice_mode.json pairing platforms auth.json auth.lock auth shared .env .op.env
    .anthropic_oauth.json mcp-tokens slack_tokens.json weixin webhook_subscriptions.json cache
    whatsapp browser_auth honcho.json mem0.json supermemory.json hindsight byterover
    shell-hooks-allowlist.json plugins mcp-installs node node_modules bin lsp hermes-agent
    .worktrees checkpoints sandboxes image_cache audio_cache video_cache document_cache
    browser_screenshots images pastes models_dev_cache.json provider_models_cache.json
    ollama_cloud_models_cache.json context_length_cache.yaml .skills_prompt_snapshot.json logs
    gateway-starts.log interrupt_debug.log gateway.pid gateway.lock gateway_state.json gateway state
    runtime processes.json cron.pid .clean_shutdown .tirith-install-failed .install_method
    .container-mode .managed .hermes_history .no-bundled-skills active_profile spawn-trees
    moa-traces hook_outputs pending disk-cleanup chrome-debug browser_recordings tmp desktop
    state-snapshots backups home profiles .update_check
"""
_NAMES = frozenset(_NAMES_TEXT.split())
_PATTERNS = (
    "*.db-wal", "*.db-shm", "*.db-journal", "*.lock", "*.tmp", ".*.tmp", "*.tmp.*",
    "*_threads.json", "feishu_*.json", "google_chat_user_*", "temp_*", ".restart_*",
    ".update_*", "desktop*", ".*_shown", "*_snapshots.json",
)  # fmt: skip


def is_known(name: str) -> bool:
    """Say whether a top-level name is one that Hermes is known to make."""
    return name in _NAMES or any(fnmatchcase(name, pattern) for pattern in _PATTERNS)
