"""The bus: one connection per service to NATS, with orders, facts and questions on it."""

from services.kit.bus.bus import Bus, DeliveryHandler, Outgoing
from services.kit.bus.connection import BusOptions, Subscription
from services.kit.bus.consumer import BatchHandler, Spoken
from services.kit.bus.dead import DeadLetter
from services.kit.bus.envelope import MSG_ID, SCHEMA, TRACEPARENT, Delivery, current_traceparent, headers_for
from services.kit.bus.micro import Caller, Route

__all__ = [
    "MSG_ID",
    "SCHEMA",
    "TRACEPARENT",
    "BatchHandler",
    "Bus",
    "BusOptions",
    "Caller",
    "DeadLetter",
    "Delivery",
    "DeliveryHandler",
    "Outgoing",
    "Route",
    "Spoken",
    "Subscription",
    "current_traceparent",
    "headers_for",
]
