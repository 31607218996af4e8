// Vercel's AI SDK: it runs the tools, and the messages of its answer are the next question's history.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { ADDRESS, DECLARED, FUNCTIONS, MODEL, QUESTION, THANKS, told } from "./conversation.mjs";

const openai = createOpenAI({ baseURL: ADDRESS, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "personae", baseURL: ADDRESS, apiKey: "none" });
const MODELS = {
  "openai-compatible": compatible(MODEL),
  "openai chat": openai.chat(MODEL),
  "openai responses": openai.responses(MODEL),
};

const tools = Object.fromEntries(
  DECLARED.map((one) => [
    one.name,
    tool({
      description: one.description,
      inputSchema: jsonSchema(one.parameters),
      execute: async (given) => FUNCTIONS[one.name](given),
    }),
  ]),
);

async function converse(name, model, stream, providerOptions) {
  const ask = async (messages) => {
    const asked = { model, messages, tools, stopWhen: stepCountIs(4), maxRetries: 0, providerOptions };
    if (!stream) return generateText(asked);
    const failures = [];
    const running = streamText({ ...asked, onError: ({ error }) => failures.push(error) });
    await running.consumeStream();
    if (failures.length) throw failures[0];
    return { text: await running.text, steps: await running.steps, response: await running.response };
  };
  const messages = [{ role: "user", content: QUESTION }];
  const first = await ask(messages);
  const calls = first.steps.flatMap((step) => step.toolCalls.map((one) => [one.toolName, one.input]));
  messages.push(...first.response.messages, { role: "user", content: THANKS });
  const second = await ask(messages);
  told(stream ? `${name}, streamed` : name, calls, [first.text, second.text]);
}

// Without `store: false` the SDK refers to the items of earlier answers by their ids.
const WAYS = process.argv[3] === "defaults"
  ? { "openai responses": {} }
  : { "openai-compatible": {}, "openai chat": {}, "openai responses": { openai: { store: false } } };
for (const [name, options] of Object.entries(WAYS)) {
  for (const stream of [false, true]) await converse(name, MODELS[name], stream, options);
}
