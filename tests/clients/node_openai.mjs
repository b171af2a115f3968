// OpenAI's client for Node against a server, step by step: what each step gives, as one object of
// JSON. Arguments: the server's URL, its key, the model, and the name of the step.
import assert from "node:assert";
import process from "node:process";
import { createRequire } from "node:module";

// The package is looked for in the folder that the test gives, or where it runs.
const require = createRequire(`${process.env.NODE_CLIENTS ?? process.cwd()}/`);
const OpenAI = require("openai").default;
const [url, apiKey, model, step] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "abc" }];
const parameters = {
  type: "object",
  properties: { city: { enum: ["Zürich", "東京"] }, known: { type: "boolean" } },
  required: ["city", "known"],
  additionalProperties: false,
};
const place = { type: "json_schema", json_schema: { name: "place", schema: parameters, strict: true } };

const steps = {
  async chat() {
    const whole = await client.chat.completions.create({ model, messages, max_tokens: 24 });
    const pieces = [];
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 24, stream: true });
    for await (const chunk of stream) pieces.push(chunk.choices[0].delta.content ?? "");
    return { whole: whole.choices[0].message.content, pieces };
  },

  async completions() {
    const asked = { model, prompt: "abc", max_tokens: 24 };
    const whole = await client.completions.create(asked);
    const pieces = [];
    for await (const chunk of await client.completions.create({ ...asked, stream: true })) {
      pieces.push(chunk.choices[0].text);
    }
    return { whole: whole.choices[0].text, pieces };
  },

  async responses() {
    const asked = { model, input: "abc", max_output_tokens: 24 };
    const whole = await client.responses.create(asked);
    const pieces = [];
    const stream = client.responses.stream(asked);
    stream.on("response.output_text.delta", (event) => pieces.push(event.delta));
    const last = await stream.finalResponse();
    assert.strictEqual(last.output_text, whole.output_text);
    return { whole: whole.output_text, pieces };
  },

  async abroad() {
    const only = { structured_outputs: { choice: [process.env.TEXT] } };
    const pieces = [];
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 90, ...only });
    stream.on("content", (delta) => pieces.push(delta));
    const last = await stream.finalChatCompletion();
    return { whole: last.choices[0].message.content, pieces };
  },

  async structured() {
    const chat = await client.chat.completions.parse({ model, messages, response_format: place });
    const format = { type: "json_schema", name: "place", schema: parameters, strict: true };
    const response = await client.responses.parse({ model, input: "abc", text: { format } });
    return { chat: chat.choices[0].message.content, response: response.output_text };
  },

  async tools() {
    const asked = [];
    const weather = (given) => {
      asked.push(given.city);
      return "12 °C";
    };
    const fn = { name: "weather", parameters, parse: JSON.parse, function: weather };
    const runner = client.chat.completions.runTools({
      model, messages, stream: process.env.STREAMS === "1", max_tokens: 50,
      tools: [{ type: "function", function: fn }],
    });
    return { asked, content: await runner.finalContent() };
  },

  async errors() {
    const kinds = {};
    const of = async (name, promise) => {
      await promise.then(() => { kinds[name] = "none"; }, (error) => { kinds[name] = error.constructor.name; });
    };
    const other = new OpenAI({ baseURL: url, apiKey: "other", maxRetries: 0 });
    await of("key", other.chat.completions.create({ model, messages }));
    await of("model", client.chat.completions.create({ model: "other", messages }));
    await of("field", client.chat.completions.create({ model, messages, temperature: -1 }));
    return kinds;
  },
};

console.log(JSON.stringify(await steps[step]()));
