"""English or Chinese: what the command says to people. Help and JSON are English always."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from schemas.errors import Ql3Error

_ORDER: Final = ("QL3_LANG", "LC_ALL", "LC_MESSAGES", "LANG")


def chinese(environment: Mapping[str, str] | None = None) -> bool:
    """Whether to speak Chinese: the first that is set of QL3_LANG, LC_ALL, LC_MESSAGES and LANG decides."""
    environment = os.environ if environment is None else environment
    for name in _ORDER:
        if value := environment.get(name):
            return value.lower().startswith("zh")
    return False


def say(english: str, chinese_text: str) -> str:
    """One of the two."""
    return chinese_text if chinese() else english


def error_line(error: Ql3Error) -> str:
    """One line about an error: the field, what is wrong, what to do. A detail of a service stays as it came."""
    where = f"{error.field}: " if error.field else ""
    retired_at_ms = error.data.get("retired_at_ms")
    if error.code == "gone" and isinstance(retired_at_ms, int):
        from services.cli.output import when

        at = when(retired_at_ms)
        return say(f"Retention removed this on {at}.", f"已按保留策略于 {at} 删除。")
    if not chinese():
        return f"{where}{error.detail or error.kind.title} {error.kind.mend}"
    from services.cli import details

    if error.code == "not_found" and error.field in ("run", "RUN"):
        return "没有此运行。请检查编号以及项目；编号见 ql3 run list。"
    title, mend = ERRORS_ZH.get(error.code, (error.kind.title, error.kind.mend))
    where = details.field(error.field) + ": " if error.field else ""
    if error.detail and (said := details.chinese(error.detail)):
        return f"{where}{said}{mend}"
    return f"{where}{title}{mend}" + (f" ({error.detail})" if error.detail else "")


STATUS_ZH: Final = {
    "created": "已创建",
    "queued": "排队中",
    "dispatching": "派发中",
    "running": "运行中",
    "waiting_approval": "等待审批",
    "retry_wait": "等待重试",
    "lost": "失联",
    "succeeded": "成功",
    "failed": "失败",
    "cancelled": "已取消",
    "timed_out": "超时",
    "online": "在线",
    "draining": "排空中",
    "offline": "离线",
}


CAUSES_ZH: Final = {
    "scheduler_down": "调度器未及时查看",
    "trigger_disabled": "触发器已停用",
    "task_disabled": "任务已停用",
    "paused": "暂停中",
    "project_archived": "项目已归档",
    "blocked_by_overlap": "与未结束的运行重叠",
    "inputs_refused": "输入不被接受",
}


def cause(name: str) -> str:
    """Why an instant was missed, as people read it."""
    return CAUSES_ZH.get(name, name) if chinese() else name


def status(name: str) -> str:
    """A status as people read it."""
    return STATUS_ZH.get(name, name) if chinese() else name


ERRORS_ZH: Final[Mapping[str, tuple[str, str]]] = {
    "invalid": ("请求无效。", "请改正所指的字段后重试。"),
    "unknown_field": ("请求中有不存在的字段。", "请删除或改正该字段。"),
    "too_large": ("请求超过上限。", "请减少内容，或提高所指的上限。"),
    "cron_invalid": ("时间表达式无效。", "请改正所指的字段。"),
    "cron_never_fires": ("该时间表达式永远不会触发。", "请选择存在的日期。"),
    "timezone_invalid": ("时区不是 IANA 时区。", "请使用如 Asia/Shanghai 的名称。"),
    "message_invalid": ("无法读取消息。", "请按声明的格式发送。"),
    "unauthenticated": ("需要登录。", "请登录，或提供有效的凭据。"),
    "forbidden": ("你没有这个权限。", "请向项目所有者申请角色。"),
    "approval_required": ("这需要先获得批准。", "请申请审批并等待结果。"),
    "assurance_required": ("这需要更强或更近的登录验证。", "请用第二因素重新登录。"),
    "human_required": ("这必须由人来做。", "请让有相应角色的人登录后操作。"),
    "rate_limited": ("尝试次数过多。", "请按 Retry-After 等待。"),
    "not_found": ("这里没有此对象。", "请检查名称或编号以及项目。"),
    "gone": ("已按保留策略删除。", "何时及为何，请看删除记录。"),
    "conflict": ("与现有内容冲突。", "请读取当前状态后重试。"),
    "name_taken": ("该名称在项目中已被使用。", "请换一个名称。"),
    "version_conflict": ("期间有人改动了它。", "请重新读取后再改。"),
    "idempotency_conflict": ("该幂等键已用于另一个请求。", "新请求请用新键。"),
    "mutation_conflict": ("该变更编号已用于别的变更。", "请用新的变更编号。"),
    "invalid_transition": ("当前状态不允许此操作。", "请查看其状态与历史。"),
    "project_archived": ("项目已归档。", "请在活动的项目中操作。"),
    "last_owner": ("不能移除项目的最后一位所有者。", "请先指定另一位所有者。"),
    "fence_rejected": ("请求者已不再持有它。", "请停止；已由他人持有。"),
    "policy_fence_conflict": ("期间角色或项目发生了变化。", "请重复该请求。"),
    "session_replaced": ("该执行节点已有更新的会话。", "请停止旧进程。"),
    "approval_expired": ("审批已过期。", "请重新申请。"),
    "approval_rejected": ("审批被拒绝。", "原因消除后请重新申请。"),
    "already_decided": ("这已经有了决定。", "请查看该决定。"),
    "self_decision": ("申请人不能自己决定。", "请让另一个人决定。"),
    "bootstrap_rejected": ("所有者链接无效。", "请在控制台签发新链接。"),
    "bootstrap_closed": ("该项目已有过所有者。", "请向所有者申请角色。"),
    "challenge_active": ("仍有一个有效的所有者链接。", "请使用它，或等它过期。"),
    "secret_unavailable": ("无法打开某个密文。", "请检查它是否存在以及密钥环。"),
    "context_unavailable": ("运行所需的密文未能及时送达。", "请检查 vault 服务。"),
    "revision_unavailable": ("无法读取任务版本。", "请重新保存任务。"),
    "limit_unsupported": ("这台机器无法执行所要求的限制。", "请看 ql3 worker list。"),
    "unavailable": ("系统的一部分无法连接。", "请稍后重试；见 ql3 doctor。"),
    "database_unavailable": ("无法连接数据库。", "请检查数据库；见 ql3 doctor。"),
    "commit_unknown": ("不清楚是否已保存。", "请重新发送同一请求。"),
    "capacity": ("目前没有余量。", "请稍后重试。"),
    "schema_unsupported": ("数据由另一版本写入。", "请使用认识它的版本。"),
    "setup_invalid": ("设置无效。", "请改正所指之处。"),
    "internal_error": ("系统内部出错。", "请查看所指服务的日志。"),
}
