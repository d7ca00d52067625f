"""Every request/reply endpoint, in one declared table.

Service `ql3-<service>`, endpoint name with dashes, subject `ql3.rpc.<service>.<name with dots>`. A wildcard endpoint
takes one more token: the id of the worker that asks, which its NATS user alone may use.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from schemas import approvals, artifacts, identity, runs, secrets, system, tasks, triggers, workers
from schemas.subjects import SERVICES

Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)


class Endpoint(Generic[Q, A]):
    """A question, its answer, and where it is asked."""

    __slots__ = ("answer", "name", "question", "service", "subject", "wildcard")

    def __init__(self, service: str, verb: str, question: type[Q], answer: type[A], *, wildcard: bool = False) -> None:
        self.service = service
        self.name = verb.replace(".", "-").replace("_", "-")
        self.subject = f"ql3.rpc.{service}.{verb}"
        self.question = question
        self.answer = answer
        self.wildcard = wildcard

    def subject_for(self, token: str | None = None) -> str:
        """The subject to ask on; a wildcard endpoint needs the caller's token."""
        if self.wildcard != (token is not None):
            raise ValueError(f"{self.service}/{self.name}: a token is {'needed' if self.wildcard else 'not taken'}")
        return f"{self.subject}.{token}" if token else self.subject

    def __repr__(self) -> str:
        return f"<Endpoint {self.subject}>"


# approval: authority
POLICY_CHECK = Endpoint("approval", "policy.check", identity.PolicyCheck, identity.PolicyDecision)
PROJECTS_CREATE = Endpoint("approval", "projects.create", identity.ProjectCreate, identity.ProjectAnswer)
PROJECTS_GET = Endpoint("approval", "projects.get", identity.ProjectRead, identity.ProjectAnswer)
PROJECTS_LIST = Endpoint("approval", "projects.list", identity.ProjectList, identity.ProjectPage)
PROJECTS_ARCHIVE = Endpoint("approval", "projects.archive", identity.ProjectArchive, identity.ProjectAnswer)
ROLES_BIND = Endpoint("approval", "roles.bind", identity.RoleBind, identity.RoleAnswer)
ROLES_LIST = Endpoint("approval", "roles.list", identity.RoleList, identity.RolePage)
IDENTITIES_REGISTER = Endpoint("approval", "identities.register", identity.IdentityRegister, identity.IdentityAnswer)
IDENTITIES_RESOLVE = Endpoint("approval", "identities.resolve", identity.IdentityResolve, identity.IdentityAnswer)
IDENTITIES_SET = Endpoint("approval", "identities.set", identity.IdentitySet, identity.IdentityAnswer)
IDENTITIES_LIST = Endpoint("approval", "identities.list", identity.IdentityList, identity.IdentityPage)
IDENTITIES_GET = Endpoint("approval", "identities.get", identity.IdentityRead, identity.IdentityDetail)
IDENTITIES_REVOKE_BINDING = Endpoint(
    "approval", "identities.revoke_binding", identity.BindingRevoke, identity.BindingAnswer
)
BOOTSTRAP_ISSUE = Endpoint("approval", "bootstrap.issue", identity.BootstrapIssue, identity.BootstrapState)
BOOTSTRAP_CLAIM = Endpoint("approval", "bootstrap.claim", identity.BootstrapClaim, identity.RoleAnswer)
BOOTSTRAP_READ = Endpoint("approval", "bootstrap.read", identity.BootstrapRead, identity.BootstrapState)
APPROVALS_LIST = Endpoint("approval", "approvals.list", approvals.ApprovalList, approvals.ApprovalPage)
APPROVALS_GET = Endpoint("approval", "approvals.get", approvals.ApprovalRead, approvals.ApprovalAnswer)
APPROVALS_CREATE = Endpoint("approval", "approvals.create", approvals.ApprovalCreate, approvals.ApprovalAnswer)
APPROVALS_DECIDE = Endpoint("approval", "approvals.decide", approvals.ApprovalDecide, approvals.ApprovalAnswer)
APPROVALS_WITHDRAW = Endpoint("approval", "approvals.withdraw", approvals.ApprovalWithdraw, approvals.ApprovalAnswer)
RULES_GET = Endpoint("approval", "rules.get", approvals.RulesRead, approvals.RulesAnswer)
RULES_SET = Endpoint("approval", "rules.set", approvals.RulesSet, approvals.RulesAnswer)
RULES_DRY_RUN = Endpoint("approval", "rules.dry_run", approvals.RulesDryRun, approvals.RulesForecast)
ACTIONS_LIST = Endpoint("approval", "actions.list", approvals.ActionList, approvals.ActionPage)
ACTIONS_GET = Endpoint("approval", "actions.get", approvals.ActionRead, approvals.ActionAnswer)
ACTIONS_RECOVER = Endpoint("approval", "actions.recover", approvals.ActionRecover, approvals.ActionAnswer)

# scheduler
TASKS_CREATE = Endpoint("scheduler", "tasks.create", tasks.TaskCreate, tasks.TaskAnswer)
TASKS_UPDATE = Endpoint("scheduler", "tasks.update", tasks.TaskUpdate, tasks.TaskAnswer)
TASKS_ENABLE = Endpoint("scheduler", "tasks.enable", tasks.TaskEnable, tasks.TaskAnswer)
TASKS_DELETE = Endpoint("scheduler", "tasks.delete", tasks.TaskDelete, tasks.TaskAnswer)
TASKS_GET = Endpoint("scheduler", "tasks.get", tasks.TaskRead, tasks.TaskAnswer)
TASKS_LIST = Endpoint("scheduler", "tasks.list", tasks.TaskList, tasks.TaskPage)
TASKS_RUN = Endpoint("scheduler", "tasks.run", tasks.TaskRun, runs.RunAnswer)
TASKS_RUN_BATCH = Endpoint("scheduler", "tasks.run_batch", tasks.TaskRunBatch, runs.RunBatchAnswer)
TASKS_APPLY = Endpoint("scheduler", "tasks.apply", tasks.TasksApply, tasks.ApplyAnswer)
TASKS_REVISIONS = Endpoint("scheduler", "tasks.revisions", tasks.RevisionList, tasks.RevisionPage)
TASKS_DIFF = Endpoint("scheduler", "tasks.diff", tasks.TaskDiff, tasks.DiffAnswer)
TASKS_RESTORE = Endpoint("scheduler", "tasks.restore", tasks.TaskRestore, tasks.TaskAnswer)
TRIGGERS_CREATE = Endpoint("scheduler", "triggers.create", triggers.TriggerCreate, triggers.TriggerAnswer)
TRIGGERS_UPDATE = Endpoint("scheduler", "triggers.update", triggers.TriggerUpdate, triggers.TriggerAnswer)
TRIGGERS_ENABLE = Endpoint("scheduler", "triggers.enable", triggers.TriggerEnable, triggers.TriggerAnswer)
TRIGGERS_DELETE = Endpoint("scheduler", "triggers.delete", triggers.TriggerDelete, triggers.TriggerAnswer)
TRIGGERS_LIST = Endpoint("scheduler", "triggers.list", triggers.TriggerList, triggers.TriggerPage)
TRIGGERS_ROTATE = Endpoint("scheduler", "triggers.rotate", triggers.WebhookRotate, triggers.TriggerAnswer)
TRIGGERS_CALL = Endpoint("scheduler", "triggers.call", triggers.WebhookCall, runs.RunAnswer)
TRIGGERS_BACKFILL = Endpoint("scheduler", "triggers.backfill", triggers.TriggerBackfill, triggers.BackfillAnswer)
TRIGGERS_PREVIEW = Endpoint("scheduler", "triggers.preview", triggers.TriggerPreview, triggers.PreviewAnswer)
TRIGGERS_MISSED = Endpoint("scheduler", "triggers.missed", triggers.MissedList, triggers.MissedPage)

# dispatcher: the run ledger
RUNS_SUBMIT = Endpoint("dispatcher", "runs.submit", runs.SubmitRuns, runs.SubmitAnswer)
RUNS_GET = Endpoint("dispatcher", "runs.get", runs.RunRead, runs.RunAnswer)
RUNS_LIST = Endpoint("dispatcher", "runs.list", runs.RunList, runs.RunPage)
RUNS_EVENTS = Endpoint("dispatcher", "runs.events", runs.RunEventList, runs.RunEventPage)
RUNS_ATTEMPTS = Endpoint("dispatcher", "runs.attempts", runs.AttemptList, runs.AttemptPage)
RUNS_CANCEL = Endpoint("dispatcher", "runs.cancel", runs.RunCancel, runs.RunAnswer)
RUNS_RETRY = Endpoint("dispatcher", "runs.retry", runs.RunRetry, runs.RunAnswer)
RUNS_EXPLAIN = Endpoint("dispatcher", "runs.explain", runs.RunExplain, runs.Explanation)
RUNS_RELEASE = Endpoint("dispatcher", "runs.release", runs.RunRelease, runs.RunReleaseAnswer)
RUNS_CLOSE = Endpoint("dispatcher", "runs.close", runs.DispatchClose, runs.RunReleaseAnswer)
ATTEMPTS_START = Endpoint("dispatcher", "attempts.start", workers.StartAttempts, workers.StartAnswer, wildcard=True)
WORKERS_REGISTER = Endpoint(
    "dispatcher", "workers.register", workers.WorkerRegister, workers.WorkerRegistered, wildcard=True
)
WORKERS_BEAT = Endpoint("dispatcher", "workers.beat", workers.WorkerBeat, workers.WorkerBeaten, wildcard=True)
WORKERS_LIST = Endpoint("dispatcher", "workers.list", workers.WorkerList, workers.WorkerPage)
WORKERS_DRAIN = Endpoint("dispatcher", "workers.drain", workers.WorkerDrain, workers.WorkerAnswer)
LEASES_VERIFY = Endpoint("dispatcher", "leases.verify", workers.LeaseVerify, workers.LeaseVerified)
ATTEMPTS_ENDED = Endpoint("dispatcher", "attempts.ended", runs.EndedRead, runs.EndedPage)
LIMITS_LIST = Endpoint("dispatcher", "limits.list", runs.LimitList, runs.LimitPage)
LIMITS_SET = Endpoint("dispatcher", "limits.set", runs.LimitSet, runs.LimitPage)
READINESS = Endpoint("dispatcher", "readiness", workers.ReadinessRead, workers.Readiness)

# vault
SECRETS_SET = Endpoint("vault", "secrets.set", secrets.SecretSet, secrets.SecretAnswer)
SECRETS_LIST = Endpoint("vault", "secrets.list", secrets.SecretList, secrets.SecretPage)
VAULT_KEY = Endpoint("vault", "key", secrets.VaultKeyRead, secrets.VaultKey)
CONTEXT_OPEN = Endpoint("vault", "context.open", secrets.ContextOpen, secrets.ContextAnswer, wildcard=True)

# retention
ARTIFACTS_LIST = Endpoint("retention", "artifacts.list", artifacts.ArtifactList, artifacts.ArtifactPage)
ARTIFACTS_READ = Endpoint("retention", "artifacts.read", artifacts.ArtifactRead, artifacts.ArtifactRange)
ARTIFACTS_RETIRED = Endpoint("retention", "artifacts.retired", workers.ArtifactsRetired, system.Done, wildcard=True)
RETENTION_GET = Endpoint("retention", "policy.get", artifacts.RetentionRead, artifacts.RetentionAnswer)
RETENTION_SET = Endpoint("retention", "policy.set", artifacts.RetentionSet, artifacts.RetentionAnswer)
HOLDS_SET = Endpoint("retention", "holds.set", artifacts.HoldSet, artifacts.HoldAnswer)
HOLDS_LIST = Endpoint("retention", "holds.list", artifacts.HoldList, artifacts.HoldPage)


class WorkerEndpoint(Endpoint[Q, A]):
    """An endpoint of one worker: `ql3.rpc.worker.<id>.<verb>`; `bound` gives the one to ask or to serve."""

    def __init__(self, verb: str, question: type[Q], answer: type[A]) -> None:
        super().__init__("worker", verb, question, answer)
        self._verb = verb

    def bound(self, worker: str) -> Endpoint[Q, A]:
        """The endpoint of this worker."""
        endpoint = Endpoint("worker", self._verb, self.question, self.answer)
        endpoint.subject = f"ql3.rpc.worker.{worker}.{self._verb}"
        return endpoint


LOG_READ = WorkerEndpoint("log.read", workers.LogRead, workers.LogRange)
LOG_FOLLOW = WorkerEndpoint("log.follow", workers.LogFollow, system.Done)

# what those who carry out approved actions answer
ACTIONS_CLOSE: Final = {
    s: Endpoint(s, "actions.close", approvals.ActionClose, approvals.ActionClosed)
    for s in ("scheduler", "dispatcher", "vault")
}

# what every service with tables answers
_WITH_TABLES: Final = tuple(service for service in SERVICES if service != "worker")
FEED_READ: Final = {s: Endpoint(s, "feed.read", system.FeedRead, system.FeedPage) for s in _WITH_TABLES}
AUDIT_READ: Final = {s: Endpoint(s, "audit.read", system.AuditRead, system.AuditPage) for s in _WITH_TABLES}
AUDIT_VERIFY: Final = {s: Endpoint(s, "audit.verify", system.AuditVerify, system.AuditVerdict) for s in _WITH_TABLES}
HEALTH: Final = {s: Endpoint(s, "health", system.HealthRead, system.HealthAnswer) for s in SERVICES}
