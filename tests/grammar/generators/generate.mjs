// Writes generated.json: schemas as zod 4, zod 3 (zod-to-json-schema) and TypeBox generate them.
//   npm install zod@4 zod3@npm:zod@3 zod-to-json-schema @sinclair/typebox && node generate.mjs > generated.json
import { z } from "zod";
import { z as z3 } from "zod3";
import { zodToJsonSchema } from "zod-to-json-schema";
import { Type } from "@sinclair/typebox";

const four = {};
four.email = z.toJSONSchema(z.object({ email: z.email(), id: z.uuid(), at: z.iso.datetime(), day: z.iso.date() }));
four.union = z.toJSONSchema(
  z.discriminatedUnion("kind", [
    z.object({ kind: z.literal("circle"), radius: z.number().positive() }),
    z.object({ kind: z.literal("square"), side: z.number().min(0).max(100) }),
  ]),
);
four.literals = z.toJSONSchema(z.object({ level: z.union([z.literal("low"), z.literal(3), z.literal(null)]), tags: z.array(z.enum(["a", "b"])).min(1).max(3) }));
four.constrained = z.toJSONSchema(z.object({ code: z.string().regex(/^[A-Z]{2}-\d{3}$/), name: z.string().min(2).max(8), n: z.int().gte(1).lte(10), pair: z.tuple([z.string(), z.number()]) }));
const Category = z.object({ name: z.string(), get children() { return z.array(Category); } });
four.recursive = z.toJSONSchema(Category);
four.record = z.toJSONSchema(z.object({ scores: z.record(z.string(), z.number()), maybe: z.string().nullable(), other: z.boolean().optional() }));

const three = {};
const of = (schema) => zodToJsonSchema(schema, { $refStrategy: "root" });
three.email = of(z3.object({ email: z3.string().email(), id: z3.string().uuid(), at: z3.string().datetime() }));
three.union = of(
  z3.discriminatedUnion("kind", [
    z3.object({ kind: z3.literal("circle"), radius: z3.number().positive() }),
    z3.object({ kind: z3.literal("square"), side: z3.number().min(0).max(100) }),
  ]),
);
three.set = of(z3.object({ numbers: z3.set(z3.number().int()), words: z3.set(z3.string().max(12)).min(2) }));
three.password = of(z3.object({ password: z3.string().regex(/^(?=.*\d)(?=.*[a-z])[a-z0-9]{4,12}$/), code: z3.string().length(3) }));
const Node = z3.object({ value: z3.number().int(), next: z3.lazy(() => Node.nullable()) });
three.recursive = of(Node);
three.intersection = of(z3.object({ a: z3.string() }).and(z3.object({ b: z3.number() })));

const box = {};
box.object = Type.Object({ id: Type.String({ format: "uuid" }), email: Type.String({ format: "email" }), n: Type.Integer({ minimum: 1, maximum: 9 }) }, { additionalProperties: false });
box.union = Type.Union([Type.Object({ type: Type.Literal("a"), x: Type.Number() }), Type.Object({ type: Type.Literal("b"), y: Type.String() })]);
box.set = Type.Object({ ids: Type.Array(Type.Integer({ minimum: 0 }), { uniqueItems: true, minItems: 2 }), points: Type.Array(Type.Object({ x: Type.Integer(), y: Type.Integer() }, { additionalProperties: false }), { uniqueItems: true }) });
box.recursive = Type.Recursive((This) => Type.Object({ id: Type.String(), nodes: Type.Array(This) }));
box.record = Type.Record(Type.String({ pattern: "^[a-z]+$" }), Type.Number());
box.template = Type.Object({ t: Type.TemplateLiteral([Type.Literal("v"), Type.Union([Type.Literal("1"), Type.Literal("2")])]), pair: Type.Tuple([Type.String(), Type.Integer()]) });
box.not = Type.Object({ not: Type.Not(Type.String()), e: Type.Enum({ A: "a", B: "b" }) });

console.log(JSON.stringify({ "zod 4": four, "zod 3": three, TypeBox: box }, null, 1));
