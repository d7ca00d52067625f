"""Why a run is where it is, in Chinese. The dispatcher tells a cause, English words and what the words are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from services.cli.words import chinese

_ASKED: Final = {
    "user": "有人取消了它",
    "timeout": "已到运行时限",
    "policy": "按规则结束",
    "shutdown": "平台正在关闭",
    "reconcile": "正在整理状态",
}
_LACKS: Final = {
    "executor": "执行器 {}",
    "name": "名称 {}",
    "pool": "节点池 {}",
    "no_pool": "不属于节点池 {} 的位置",
    "label": "标签 {}",
    "runtime": "运行环境 {}",
    "memory": "内存 {}",
    "cores": "{} 个 CPU 核",
}
_AGAIN: Final = "无需操作；重试会产生新的运行。"

WORDS_ZH: Final[Mapping[str, tuple[str, str]]] = {
    # in the queue
    "no_worker": ("没有在线的执行节点。", "请启动执行节点，或查看为何没有节点在线（ql3 worker list）。"),
    "worker_offline": (
        "可以执行它的节点 {workers} 已离线。",
        "请重新启动该节点，或查看为何收不到它的消息（ql3 worker list）。",
    ),
    "worker_draining": (
        "可以执行它的节点 {workers} 正在排空，不接新运行。",
        "请让它恢复工作（ql3 worker resume），或另启一个合适的节点。",
    ),
    "worker_without_slots": (
        "可以执行它的节点 {workers} 目前不提供槽位：磁盘空间太少，或未设置槽位。",
        "请清理其磁盘，或另启一个合适的节点。",
    ),
    "no_matching_worker": ("没有执行节点具备：{lacking}。", "请启动具备条件的节点，或修改任务的执行位置。"),
    "no_free_slot": ("可用节点 {workers} 的 {slots} 个槽位都已占用。", "有空闲槽位时即派发。"),
    "task_limit": ("任务 {name} 进行中的运行已达上限 {limit}。", "该任务有运行结束时即派发。"),
    "overlap": ("任务 {name} 有运行尚未结束，它的运行依次进行。", "前一个运行结束时即派发。"),
    "project_limit": (
        "项目 {name} 进行中的运行已达上限 {limit}。",
        "项目有运行结束时即派发；上限见 ql3 project limit。",
    ),
    "key_limit": (
        "键 {name} 下进行中的运行已达上限 {limit}。",
        "该键下有运行结束时即派发；上限见 ql3 project limit --key。",
    ),
    "behind_others": ("前面还有 {ahead} 个运行。", "轮到时即派发。"),
    "next": ("下一个就是它，马上派发。", "无需操作。"),
    "revision_unavailable": ("无法读取它要执行的任务版本。", "请重新保存任务并重新运行。"),
    # waiting
    "approval_not_asked": ("它需要审批；审批服务尚未确认收到请求。", "请求会一直重发，直到得到确认。"),
    "waiting_approval": (
        "它需要审批，尚未放行。",
        "请批准或拒绝（ql3 approval list）；请求过期则超时结束，未到时间不会放行。",
    ),
    "retry_wait": (
        "第 {attempt}/{max_attempts} 次尝试已结束（{error_code}）；距下次尝试的间隔未到。",
        "间隔结束后排队下一次尝试。",
    ),
    "retry_due": ("第 {attempt}/{max_attempts} 次尝试已结束（{error_code}）；间隔已到。", "马上重新排队。"),
    # in work
    "offered": ("已派给节点 {worker}，尚未开始。", "租约到期前会重发；到期则退回队列。"),
    "offer_not_taken": ("已向节点 {worker} 派发 {offers} 次，仍未被接收。", "租约到期前会重发；到期则退回队列。"),
    "offer_lapsed": ("节点 {worker} 未在租约时间内接收。", "马上退回队列；尚未启动任何进程。"),
    "not_due": ("已在节点 {worker} 就绪，未到开始时间。", "到时由节点启动。"),
    "starting": ("节点 {worker} 可以启动它了。", "节点会报告开始或结束。"),
    "running": ("正在节点 {worker} 上运行。", "其进程树结束时结束。"),
    "silent_worker": (
        "它在节点 {worker} 手中，该节点已有一段时间没有续租。",
        "再收到节点消息即继续；否则租约到期后判为失联。",
    ),
    "lease_over": ("节点 {worker} 的租约已到期，进程情况不明。", "马上判定：该次尝试失联；若可安全重试则重试。"),
    "listening": (
        "节点 {worker} 的租约已到期，但调度服务自己中断过，未能收到它的消息。",
        "先给节点几秒钟报到，再作判定。",
    ),
    "inconsistent": ("账本中没有它正在进行的尝试。", "请查看 dispatcher 的日志。"),
    # on its way to its end
    "ending": ("{asked}；没有进程在运行。", "马上结束。"),
    "cancel_undelivered": ("{asked}；正在通知节点 {worker}。", "由节点结束进程树。"),
    "cancel_delivered": (
        "{asked}；已通知节点 {worker}，尚未证明进程树已结束。",
        "先 TERM，宽限期后 KILL；由节点报告结束。",
    ),
    "cancel_unheard": (
        "{asked}；已通知节点 {worker}，但收不到它的消息。",
        "会再次通知；得到节点证明或租约到期时结束。",
    ),
    "cancel_blocked": (
        "{asked}；已通知节点 {worker} {deliveries} 次，仍未证明结束。",
        "请检查该节点；再次取消会重新通知。",
    ),
    # ended
    "succeeded": ("进程以退出码 0 结束。", "无需操作。"),
    "process_exit": ("进程{how}。", _AGAIN),
    "overlap_skipped": ("它到来时该任务的另一个运行尚未结束，按规则跳过。", _AGAIN),
    "overlap_queue_full": ("该任务等待的运行已达上限。", _AGAIN),
    "overlap_replaced": ("被该任务更新的运行取代。", _AGAIN),
    "queue_timeout": ("在排队时限内未能开始。", _AGAIN),
    "approval_rejected": ("审批被拒绝或撤回。", _AGAIN),
    "approval_expired": ("没有人及时批准。", _AGAIN),
    "worker_lost": ("节点停止续租，进程情况不明。", _AGAIN),
    "process_vanished": ("进程已消失，没有留下退出码。", _AGAIN),
    "context_unavailable": ("所需密文未能及时送达。", _AGAIN),
    "executor_start_failed": ("进程无法启动。", _AGAIN),
    "not_started": ("节点未能及时启动它。", _AGAIN),
    "run_timeout": ("已到运行时限，其进程树已被结束。", _AGAIN),
    "cancelled_by_user": ("有人取消了它。", _AGAIN),
    "cancelled_by_policy": ("按规则结束。", _AGAIN),
    "cancelled_by_shutdown": ("随平台关闭而结束。", _AGAIN),
}
_OTHER_END: Final = ("结束（{cause}）。", _AGAIN)


def explained(found: Mapping[str, Any]) -> tuple[str, str]:
    """Sentence and next step of an explanation, in the language that is spoken."""
    if not chinese():
        return found["sentence"], found["next_step"]
    facts: dict[str, Any] = found["facts"]
    sentence, step = WORDS_ZH.get(found["cause"], _OTHER_END)
    words = {
        **facts,
        "cause": found["cause"],
        "workers": "、".join(facts.get("workers", [])),
        "lacking": "，".join(_LACKS[kind].format(wanted) for kind, wanted in facts.get("lacking", [])),
        "asked": _ASKED.get(facts.get("reason", ""), ""),
        "how": f"被信号 {facts['signal']} 终止" if "signal" in facts else f"以退出码 {facts.get('exit_code')} 结束",
    }
    told = sentence.format_map(words)
    if "late_exit_code" in facts:
        told += "之后收到的回执说明了它的结局。"
    return told, step
