"""Sign-in of people: sessions, second factors, the owner link and password links. Owner: the gateway."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Value, View
from schemas.errors import Ql3Error
from schemas.identity import DEFAULT_PROJECT, Assurance
from schemas.ids import ProjectId
from services.gateway import sessions
from services.gateway.accounts import SignedIn
from services.gateway.calls import Call
from services.gateway.operations import Answer, Nothing, Operations
from services.gateway.passwords import MAX_CHARS

operations = Operations("sessions")
SIGN_IN_BYTES = 8 * 1024

UserName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._@-]{0,62}\Z")]
Password = Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]
Code = Annotated[str, Meta(pattern=r"^[0-9]{6}\Z")]
Token = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{43}\Z")]


class Login(Value, frozen=True, kw_only=True):
    """`code` is that of the second factor, when one is set."""

    user: UserName
    password: Password
    code: Code | None = None


class Claim(Value, frozen=True, kw_only=True):
    """The two parts of the owner link, and the name and password of who becomes the owner."""

    challenge: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{22}\Z")]
    token: Token
    user: UserName
    password: Password
    display_name: Annotated[str, Meta(max_length=255)] | None = None
    project: ProjectId = DEFAULT_PROJECT


class Join(Value, frozen=True, kw_only=True):
    """The two parts of a password link, and the new password."""

    link: Annotated[str, Meta(max_length=36)]
    token: Token
    password: Password


class PasswordChange(Value, frozen=True, kw_only=True):
    """The present password and the new one."""

    current: Password
    new: Password


class Proof(Value, frozen=True, kw_only=True):
    """Your password, once more."""

    password: Password


class FactorCode(Value, frozen=True, kw_only=True):
    """A code of the second factor."""

    code: Code


class Who(View, frozen=True, kw_only=True):
    """Who you are here. `csrf` goes into the `Ql3-Csrf` header of each change that a page makes; `second_factor` says
    whether one is set, for people who signed in with a password."""

    type: str
    id: str
    kind: Literal["session", "credential"]
    assurance: Assurance
    authenticated_at_ms: int
    csrf: str | None
    second_factor: bool | None


class Enrolled(View, frozen=True, kw_only=True):
    """The address for an authenticator application; it holds the shared secret and is shown once."""

    uri: str


def _signed_in(call: Call[Login] | Call[Claim] | Call[Join], signed_in: SignedIn) -> Answer:
    session = signed_in.session
    who = Who(
        type="user",
        id=session.user_name,
        kind="session",
        assurance=session.assurance,
        authenticated_at_ms=session.authenticated_at_ms,
        csrf=call.desk.authenticator.csrf_of(signed_in.presented),
        second_factor=session.assurance == "multi_factor",
    )
    cookie = sessions.set_cookie(sessions.cookie_value(*signed_in.presented), secure=call.desk.settings.secure)
    return Answer(body=who, headers={"Set-Cookie": cookie})


def _own_session(call: Call[Nothing] | Call[Proof] | Call[FactorCode] | Call[PasswordChange]) -> str:
    if call.principal is None or call.principal.kind != "session":
        raise Ql3Error("forbidden", "This is for people who signed in with a password.")
    return call.principal.id


@operations.post("/session", Login, Who, body_bytes=SIGN_IN_BYTES, keep="no", public=True)
async def sign_in(call: Call[Login]) -> Answer:
    """Sign in: a new session in a cookie."""
    login = call.input
    signed_in = await call.desk.accounts.sign_in(login.user, login.password, login.code, call.peer.address)
    await call.desk.authenticator.end_presented(call.request_headers)
    return _signed_in(call, signed_in)


@operations.get("/session", Nothing, Who)
async def get_session(call: Call[Nothing]) -> Who:
    """Who you are."""
    principal = call.principal
    assert principal is not None
    return Who(
        type=principal.actor.type,
        id=principal.actor.id,
        kind=principal.kind,
        assurance=principal.actor.assurance,
        authenticated_at_ms=principal.actor.authenticated_at_ms,
        csrf=principal.csrf,
        second_factor=await call.desk.accounts.has_second_factor(principal.actor) if principal.csrf else None,
    )


@operations.delete("/session", Nothing, Nothing, keep="no")
async def sign_out(call: Call[Nothing]) -> Answer:
    """Sign out: the session ends here and in the browser."""
    session_id = _own_session(call)
    await call.desk.accounts.sign_out(call.actor, session_id)
    call.desk.authenticator.drop(session_id)
    return Answer(body=Nothing(), headers={"Set-Cookie": sessions.drop_cookie(secure=call.desk.settings.secure)})


@operations.post("/session/password", PasswordChange, Nothing, body_bytes=SIGN_IN_BYTES, keep="no")
async def change_password(call: Call[PasswordChange]) -> Nothing:
    """Change your password; your other sessions end."""
    session_id = _own_session(call)
    change = call.input
    await call.desk.accounts.change_password(call.actor, session_id, change.current, change.new, call.peer.address)
    return Nothing()


@operations.post("/session/totp", Proof, Enrolled, body_bytes=SIGN_IN_BYTES, keep="no")
async def enrol_factor(call: Call[Proof]) -> Enrolled:
    """Begin a second factor; it counts once a code of it was confirmed."""
    _own_session(call)
    return Enrolled(uri=await call.desk.accounts.enrol(call.actor, call.input.password, call.peer.address))


@operations.post("/session/confirm", FactorCode, Nothing, body_bytes=SIGN_IN_BYTES, keep="no")
async def confirm_factor(call: Call[FactorCode]) -> Nothing:
    """Prove the second factor now: confirms a new one, and makes this session a recent, strong sign-in."""
    session_id = _own_session(call)
    await call.desk.accounts.confirm(call.actor, session_id, call.input.code, call.peer.address)
    call.desk.authenticator.drop(session_id)
    return Nothing()


@operations.delete("/session/totp", FactorCode, Nothing, keep="no")
async def remove_factor(call: Call[FactorCode]) -> Nothing:
    """Remove your second factor, with a code of it."""
    _own_session(call)
    await call.desk.accounts.remove_second_factor(call.actor, call.input.code, call.peer.address)
    return Nothing()


@operations.post("/bootstrap/claim", Claim, Who, body_bytes=SIGN_IN_BYTES, keep="no", public=True)
async def claim_ownership(call: Call[Claim]) -> Answer:
    """Become the owner with the one-time owner link, and sign in."""
    claim = call.input
    signed_in = await call.desk.ownership.claim(
        project=claim.project,
        challenge=claim.challenge,
        token=claim.token,
        user_name=claim.user,
        password=claim.password,
        display_name=claim.display_name,
        peer=call.peer.address,
    )
    await call.desk.authenticator.end_presented(call.request_headers)
    return _signed_in(call, signed_in)


@operations.post("/password-links/use", Join, Who, body_bytes=SIGN_IN_BYTES, keep="no", public=True)
async def use_password_link(call: Call[Join]) -> Answer:
    """Set a password with a one-time password link, and sign in."""
    join = call.input
    signed_in = await call.desk.accounts.use_link(join.link, join.token, join.password, call.peer.address)
    await call.desk.authenticator.end_presented(call.request_headers)
    return _signed_in(call, signed_in)
