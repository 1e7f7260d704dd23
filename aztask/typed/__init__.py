"""Typed payloads: arguments and results as the annotations of a task say, on a wire of plain data.

A task may take and return dataclasses, enums, paths, sets, tuples, models of pydantic and so on.
The message holds what any reader of msgpack or JSON knows: maps, lists, text and numbers, and the
few types that the serializer has always written (`aztask.message.serializer`). No name of a class
is on the wire. So other languages and older workers read it, and nothing in a message chooses what
is built: only the code that reads does, by its annotations.

How it works

* An annotation becomes a *shape* (`aztask.typed.annotations`): it writes a value as plain data, and
  reads plain data as a value (`aztask.typed.shapes`, `aztask.typed.containers`,
  `aztask.typed.records`, `aztask.typed.libraries`).
* A task has one `aztask.typed.conversion.Conversion`, made at its first call from its resolved
  annotations. A task whose annotations are all plain converts nothing: it has no converter, and a
  send only looks up the types of its arguments in a set.

Rules
1. A value that could be sent without a converter is written as it always was: the same bytes, the
   same unique key. Only values without an encoding of their own are written anew: dataclasses,
   sets, paths, enums, Structs, models.
2. Reading is by annotation. What an annotation cannot say stays as it is: ``Any``, names that
   cannot be resolved, classes of other kinds.
3. Without ``strict`` a value that does not fit is passed on unchanged, as a task without a
   converter passes it, and is logged once for each task. A part that is plain (text for a number)
   stays where it is; if the whole cannot be built (a map lacks a field), the function gets the
   plain data. So no message is dead-lettered for its types.
4. With ``strict`` the sender raises EncodeError and the worker dead-letters the message; both name
   the argument and the field.
5. Fields that a class does not have are ignored when a map is read, and missing ones get their
   defaults, so that senders and workers of two releases understand each other. A TypedDict keeps
   unknown keys. A pydantic model or a Struct follows its own settings (``extra``,
   ``forbid_unknown_fields``).
6. A value is refused, strict or not, if the reader would make another one of it: an instance of a
   subclass, or a member of a union that reads as another member. A path in ``str | Path`` arrives
   as text.
7. A result is read by the return annotation of its task where the app that asks has registered the
   task; elsewhere it is the plain data. A result is never refused for its type, because its task
   has run.
8. Inside a dataclass, text is accepted for a date, a UUID, a Decimal, bytes (base64) and a map's
   int keys, because other languages write JSON. An argument that is text itself stays text: it
   could be sent before.
9. Whatever the code of a user raises inside a converter is a misfit of that field when reading, and
   EncodeError when writing. A task whose result cannot be written is not run again.
10. Texts name places and types. They hold no value, no map's key, and no text of such an error.

Why own code, and not msgspec for all: it converts dataclasses, enums and the rest as well, but it
is no dependency of aztask, and what arrives must not depend on what else is installed. A Struct is
converted by msgspec, and a model by pydantic, which then are installed; neither is imported here.
"""
