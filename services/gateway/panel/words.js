// English and Chinese. The browser's languages choose; the switch is remembered.

const KEY = "ql3-language";

const WORDS = {
  runs: ["Runs", "运行"],
  tasks: ["Tasks", "任务"],
  approvals: ["Approvals", "审批"],
  secrets: ["Secrets", "密钥"],
  workers: ["Workers", "执行器"],
  account: ["Account", "账户"],
  project: ["Project", "项目"],
  theme: ["Light or dark", "明暗切换"],
  language: ["中文", "English"],
  signin: ["Sign in", "登录"],
  signout: ["Sign out", "退出"],
  "signin.hint": [
    "No account yet? The first one is made with the owner link that `ql3 up` prints when it starts.",
    "还没有账户？第一个账户用 `ql3 up` 启动时打印的所有者链接创建。",
  ],
  user: ["Name", "用户名"],
  password: ["Password", "密码"],
  "password.new": ["New password", "新密码"],
  "password.current": ["Present password", "当前密码"],
  "password.hint": ["At least 12 characters.", "至少 12 个字符。"],
  "password.change": ["Change password", "修改密码"],
  "password.changed": ["Changed. Your other sessions have ended.", "已修改，其他会话已退出。"],
  code: ["Code", "验证码"],
  "code.hint": ["Six digits from your authenticator application.", "验证器应用中的六位数字。"],
  "claim.title": ["Become the owner", "成为所有者"],
  "claim.text": [
    "This link works once. Choose the name and password with which you will sign in.",
    "此链接只能使用一次。请设置登录用的用户名和密码。",
  ],
  "claim.submit": ["Become the owner", "成为所有者"],
  "join.title": ["Set your password", "设置密码"],
  "join.text": ["This link works once.", "此链接只能使用一次。"],
  "join.submit": ["Set password and sign in", "设置密码并登录"],
  task: ["Task", "任务"],
  status: ["Status", "状态"],
  started: ["Started", "开始"],
  took: ["Took", "用时"],
  cause: ["Trigger", "触发"],
  result: ["Result", "结果"],
  "all.tasks": ["All tasks", "所有任务"],
  "all.states": ["All states", "所有状态"],
  more: ["Show more", "加载更多"],
  live: ["Live", "实时"],
  "live.down": ["Reconnecting…", "正在重连…"],
  "runs.none": ["No runs yet. Run a task, or wait for its schedule.", "还没有运行。请运行任务，或等待其计划触发。"],
  "tasks.none": ["No tasks yet. Make the first one.", "还没有任务，请创建第一个。"],
  "approvals.none": ["Nothing waits for a decision.", "没有等待审批的请求。"],
  "secrets.none": ["No secrets yet.", "还没有密钥。"],
  "workers.none": ["No worker is known. Runs wait until one registers.", "没有执行器，运行将等待执行器注册。"],
  "run.title": ["Run of {task}", "{task} 的运行"],
  "run.this": ["The run that waits", "等待中的运行"],
  "run.cancel": ["Cancel", "取消"],
  "run.cancelled": ["The run is being ended.", "正在结束运行。"],
  "run.retry": ["Run again", "重新运行"],
  "run.now": ["Run now", "立即运行"],
  "run.made": ["Run {id} was made.", "已创建运行 {id}。"],
  "run.why": ["Why is it here?", "为什么停在这里？"],
  "run.events": ["What happened", "事件"],
  "run.attempts": ["Attempts", "尝试"],
  trigger: ["its trigger", "触发器"],
  attempt: ["Attempt", "尝试"],
  worker: ["Worker", "执行器"],
  exit: ["Exit code", "退出码"],
  created: ["Created", "创建"],
  scheduled: ["Scheduled for", "计划时间"],
  by: ["Asked by", "发起者"],
  id: ["Id", "编号"],
  log: ["Log", "日志"],
  "log.follow": ["Follow", "跟随"],
  "log.download": ["Whole log", "完整日志"],
  "log.waiting": ["Waiting for output…", "等待输出…"],
  "log.live": ["{size} so far", "已有 {size}"],
  "log.ended": ["{size}, ended", "{size}，已结束"],
  "log.cut": ["{size}, cut at its quota", "{size}，已达配额被截断"],
  "log.empty": ["No output.", "没有输出。"],
  "log.tail": ["… only the last {size} are shown here", "…… 此处只显示最后 {size}"],
  name: ["Name", "名称"],
  schedule: ["Schedule", "计划"],
  next: ["Next", "下次"],
  command: ["Command", "命令"],
  "command.hint": ["Runs in a shell: sh -c.", "通过 sh -c 执行。"],
  "cron.hint": ["Cron expression, for example */5 * * * *. Empty: only by hand.", "Cron 表达式，例如 */5 * * * *；留空则仅手动运行。"],
  timezone: ["Time zone", "时区"],
  "needs.approval": ["Needs approval before each run", "每次运行前需要审批"],
  "needs.approval.short": ["needs approval", "需要审批"],
  enabled: ["Enabled", "启用"],
  disabled: ["disabled", "已停用"],
  enable: ["Enable", "启用"],
  disable: ["Disable", "停用"],
  "task.new": ["New task", "新建任务"],
  "task.create": ["Create task", "创建任务"],
  "task.created": ["Task {name} was created.", "任务 {name} 已创建。"],
  cancel: ["Cancel", "取消"],
  manual: ["by hand", "手动"],
  approve: ["Approve", "批准"],
  reject: ["Reject", "拒绝"],
  reason: ["Reason (optional)", "理由（可选）"],
  "approval.decided": ["Decided: {state}.", "已决定：{state}。"],
  "approval.open": ["Waiting", "等待中"],
  "approval.all": ["All", "全部"],
  action: ["Action", "操作"],
  risk: ["Risk", "风险"],
  requested: ["Requested", "请求时间"],
  expires: ["Expires", "过期"],
  decision: ["Decision", "决定"],
  version: ["Version", "版本"],
  value: ["Value", "值"],
  "secret.set": ["Set secret", "设置密钥"],
  "secret.hint": ["The value is encrypted and never shown again.", "值会被加密，且不再显示。"],
  "secret.saved": ["Secret {name} is at version {version}.", "密钥 {name} 的版本为 {version}。"],
  slots: ["In use", "占用"],
  system: ["System", "系统"],
  heartbeat: ["Last heard", "最近心跳"],
  drain: ["Drain", "停止派发"],
  resume: ["Resume", "恢复"],
  signed: ["Signed in as {name} ({assurance}).", "已登录：{name}（{assurance}）。"],
  factor: ["Second factor", "第二因素"],
  "factor.begin": ["Set up a second factor", "设置第二因素"],
  "factor.add": ["Add this key to your authenticator application, then enter a code of it.", "把此密钥添加到验证器应用，然后输入验证码。"],
  "factor.open": ["Open it in an application on this device", "在本设备的应用中打开"],
  "factor.why": ["This needs proof that it is you, now.", "此操作需要立即确认您的身份。"],
  "factor.first": [
    "Decisions need a second factor. Set it up once; it takes a minute.",
    "审批决定需要第二因素。只需设置一次。",
  ],
  "factor.needed": ["Nothing was decided: the second factor was not confirmed.", "未作决定：第二因素未确认。"],
  "factor.done": ["The second factor counts from now on.", "第二因素已启用。"],
  confirm: ["Confirm", "确认"],
  tokens: ["API credentials", "API 凭据"],
  "token.new": ["New credential", "新建凭据"],
  "token.once": ["This is shown once. Keep it now:", "仅显示一次，请立即保存："],
  revoke: ["Revoke", "吊销"],
  loading: ["Loading…", "加载中…"],
  "state.created": ["created", "已创建"],
  "state.queued": ["queued", "排队中"],
  "state.dispatching": ["starting", "启动中"],
  "state.running": ["running", "运行中"],
  "state.waiting_approval": ["waits for approval", "等待审批"],
  "state.retry_wait": ["waits to retry", "等待重试"],
  "state.lost": ["lost", "失联"],
  "state.succeeded": ["succeeded", "成功"],
  "state.failed": ["failed", "失败"],
  "state.cancelled": ["cancelled", "已取消"],
  "state.timed_out": ["timed out", "超时"],
  "state.claimed": ["claimed", "已领取"],
  "state.starting": ["starting", "启动中"],
  "state.online": ["online", "在线"],
  "state.draining": ["draining", "停止派发"],
  "state.offline": ["offline", "离线"],
  "state.pending": ["waiting", "等待中"],
  "state.approved": ["approved", "已批准"],
  "state.consumed": ["approved", "已批准"],
  "state.rejected": ["rejected", "已拒绝"],
  "state.withdrawn": ["withdrawn", "已撤回"],
  "state.expired": ["expired", "已过期"],
  "state.active": ["active", "有效"],
  "state.revoked": ["revoked", "已吊销"],
};

// The API speaks English; its codes are stable, so what people meet most is said in Chinese here.
const REFUSALS = {
  invalid: "请求无效，请更正所示字段。",
  unknown_field: "存在未知字段。",
  too_large: "内容超过上限。",
  cron_invalid: "计划表达式无效。",
  cron_never_fires: "该计划永远不会触发。",
  timezone_invalid: "时区无效，请使用 Asia/Shanghai 之类的 IANA 名称。",
  unauthenticated: "用户名、密码或验证码错误，或登录已失效。",
  forbidden: "您没有权限，请向项目所有者申请角色。",
  approval_required: "需要先获得批准。",
  assurance_required: "需要更强或更近期的登录验证。",
  rate_limited: "尝试次数过多，请稍后再试。",
  not_found: "不存在，请检查名称与项目。",
  gone: "已按保留策略删除。",
  conflict: "与现有状态冲突，请刷新后重试。",
  name_taken: "名称已被使用，请换一个。",
  version_conflict: "内容已被他人修改，请刷新后重试。",
  invalid_transition: "当前状态不允许此操作。",
  project_archived: "项目已归档。",
  last_owner: "不能移除最后一位所有者。",
  approval_expired: "审批已过期。",
  already_decided: "已有决定。",
  self_decision: "不能审批自己的请求，请由他人决定。",
  human_required: "只能由人来决定。",
  bootstrap_rejected: "链接无效。",
  bootstrap_closed: "项目已有所有者。",
  unavailable: "系统的一部分暂时不可用，请稍后重试。",
  database_unavailable: "数据库不可用，请稍后重试。",
  capacity: "系统繁忙，请稍后重试。",
  internal_error: "内部错误，请查看服务日志。",
};

let current = localStorage.getItem(KEY) ?? document.documentElement.lang;

/** `en` or `zh-CN`. */
export const language = () => (current.startsWith("zh") ? "zh-CN" : "en");

/** The other language from now on. */
export function switchLanguage() {
  current = language() === "en" ? "zh-CN" : "en";
  localStorage.setItem(KEY, current);
  /** A refusal in the panel's language, or nothing where the API's own words serve. */
export function refusal(problem) {
  if (language() === "en" || !(problem.code in REFUSALS)) return null;
  return problem.field ? `${REFUSALS[problem.code]}（${problem.field}）` : REFUSALS[problem.code];
}

document.documentElement.lang = language();
}

/** The words of a key, `{name}` filled in. */
export function t(key, values = {}) {
  const words = WORDS[key];
  if (!words) return key.startsWith("state.") ? key.slice(6) : key;
  const text = words[language() === "en" ? 0 : 1];
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

/** A refusal in the panel's language, or nothing where the API's own words serve. */
export function refusal(problem) {
  if (language() === "en" || !(problem.code in REFUSALS)) return null;
  return problem.field ? `${REFUSALS[problem.code]}（${problem.field}）` : REFUSALS[problem.code];
}

document.documentElement.lang = language();
