// The client of openai for Node against a server: node of_node.js URL MODEL; what came is printed as JSON.
const { OpenAI } = require('openai');

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: 'none', maxRetries: 0 });
const messages = [{ role: 'user', content: 'How is the weather in Oslo?' }];
const asked = { model, messages, max_tokens: 100, temperature: 1, seed: 5 };
const properties = { city: { enum: ['Oslo', 'Lima'] }, days: { type: 'integer', minimum: 1, maximum: 9 } };
const schema = { type: 'object', properties, required: ['city', 'days'], additionalProperties: false };
const tools = [{ type: 'function', function: { name: 'get_weather', description: 'What the weather is.', parameters: schema } }];
const held = { type: 'json_schema', json_schema: { name: 'asked', strict: true, schema } };

async function refused(wrong) {
  try { await client.chat.completions.create({ ...asked, ...wrong }); } catch (error) { return [error.status, error.code]; }
  return ['answered'];
}

async function main() {
  const found = {}, short = { ...asked, max_tokens: 12 };
  const whole = await client.chat.completions.create(short);
  found.whole = whole.choices[0].message.content; found.tokens = whole.usage.completion_tokens;
  found.streamed = '';
  const stream = await client.chat.completions.create({ ...short, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    found.streamed += chunk.choices[0]?.delta?.content ?? '';
    found.streamed_tokens = chunk.usage?.completion_tokens ?? 0;
  }

  const required = { ...asked, tools, tool_choice: 'required', parallel_tool_calls: false };
  const called = (await client.chat.completions.create(required)).choices[0];
  const call = called.message.tool_calls[0];
  found.call = [call.function.name, Object.keys(JSON.parse(call.function.arguments)).sort(), called.finish_reason];
  const final = await client.chat.completions.stream(required).finalChatCompletion();
  found.same_call = final.choices[0].message.tool_calls[0].function.arguments === call.function.arguments;
  const result = { role: 'tool', tool_call_id: call.id, content: 'fine' };
  const after = await client.chat.completions.create({ ...short, messages: [...messages, called.message, result], tools, tool_choice: 'none' });
  found.after = typeof after.choices[0].message.content === 'string';

  const parsed = await client.chat.completions.parse({ ...asked, response_format: held });
  found.json_schema = Object.keys(parsed.choices[0].message.parsed).sort();
  const response = await client.responses.create({ model, input: 'Hello', max_output_tokens: 8 });
  found.responses = response.usage.output_tokens <= 8 && typeof response.output_text === 'string';
  found.refused = [await refused({ model: 'gpt-4' }), await refused({ temperature: 9 }), await refused({ max_tokens: -1 })];
  found.models = [];
  for await (const each of client.models.list()) found.models.push(each.id);
  const left = await client.chat.completions.create({ ...asked, max_tokens: 800, stream: true, ignore_eos: true });
  for await (const chunk of left) left.controller.abort();
  console.log(JSON.stringify(found));
}

main();
