// Sends a task to an aztask worker, over Service Bus or a Storage queue. It needs a JDK of version 17 or newer, and nothing else.
//
//   java Send.java CONNECTION_STRING QUEUE TASK ['[1, 2]'] ['{"name": "x"}'] [TASK_ID]
//
// Both services speak HTTP. A program that has com.azure:azure-messaging-servicebus or azure-storage-queue anyway
// sends the same parts with that: body, content type, message id, and the properties task and id.
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.net.URI;
import java.net.URLEncoder;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.security.GeneralSecurityException;
import java.time.Duration;
import java.time.Instant;
import java.time.ZoneOffset;
import java.time.format.DateTimeFormatter;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;
import java.util.UUID;
import java.util.regex.Pattern;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;

import static java.nio.charset.StandardCharsets.UTF_8;

public final class Send {
    static final String CONTENT_TYPE = "application/json";

    // As in docs/static/task-message.schema.json.
    record TaskMessage(String task, String id, byte[] body) {
        static TaskMessage of(String task, String args, String kwargs, String id) {
            if (!Json.isArray(args) || !Json.isObject(kwargs)) {
                throw new IllegalArgumentException("ARGS must be a JSON array such as [1], KWARGS a JSON object");
            }
            return new TaskMessage(task, id, ("[" + args + "," + kwargs + ",{}]").getBytes(UTF_8));
        }

        String messageId() {
            return id + ":0:0";
        }
    }

    // learn.microsoft.com/rest/api/servicebus/send-message-to-queue
    static void sendToServiceBus(Map<String, String> connection, String queue, TaskMessage message) throws Exception {
        URI endpoint = URI.create(need(connection, "Endpoint"));
        boolean local = connection.containsKey("usedevelopmentemulator"); // its port for HTTP: that of the administration
        int port = endpoint.getPort() >= 0 ? endpoint.getPort() : local ? 5300 : 443;
        String url = (local ? "http://" : "https://") + endpoint.getHost() + ":" + port + "/" + queue;
        send(HttpRequest.newBuilder(URI.create(url + "/messages"))
                .header("Authorization", sharedAccessSignature(connection, url))
                .header("Content-Type", CONTENT_TYPE)
                .header("BrokerProperties", "{\"MessageId\": " + Json.text(message.messageId()) + ", \"Label\": "
                        + Json.text(message.task) + "}")
                .header("task", property(message.task))
                .header("id", property(message.id))
                .POST(HttpRequest.BodyPublishers.ofByteArray(message.body)));
    }

    // A header: text has quotes, to tell it from numbers.
    static String property(String text) {
        if (!text.matches("[ -~]*")) {
            throw new IllegalArgumentException("over HTTP, TASK and TASK_ID must be ASCII");
        }
        return '"' + text.replace("\"", "\\\"") + '"';
    }

    // learn.microsoft.com/azure/service-bus-messaging/service-bus-sas
    static String sharedAccessSignature(Map<String, String> connection, String url) throws GeneralSecurityException {
        if (connection.containsKey("sharedaccesssignature")) {
            return connection.get("sharedaccesssignature");
        }
        String signed = URLEncoder.encode(url, UTF_8);
        long expiry = Instant.now().plusSeconds(300).getEpochSecond();
        String signature = sign(need(connection, "SharedAccessKey").getBytes(UTF_8), signed + "\n" + expiry);
        return "SharedAccessSignature sr=" + signed + "&sig=" + URLEncoder.encode(signature, UTF_8)
                + "&se=" + expiry + "&skn=" + need(connection, "SharedAccessKeyName");
    }

    // learn.microsoft.com/rest/api/storageservices/put-message
    static void sendToStorageQueue(Map<String, String> connection, String queue, TaskMessage message) throws Exception {
        String text = Base64.getEncoder().encodeToString(msgpack(Map.of(
                "v", 1,
                "headers", Map.of("task", message.task, "id", message.id),
                "properties", Map.of("message_id", message.messageId(), "content_type", CONTENT_TYPE, "subject", message.task),
                "body", message.body)));
        byte[] body = ("<QueueMessage><MessageText>" + text + "</MessageText></QueueMessage>").getBytes(UTF_8);
        // -1: it is kept until a worker deletes it. The service's own default is seven days.
        URI url = URI.create(queueEndpoint(connection) + "/" + queue + "/messages?messagettl=-1");
        HttpRequest.BodyPublisher posted = HttpRequest.BodyPublishers.ofByteArray(body);
        if (connection.containsKey("sharedaccesssignature")) {
            send(HttpRequest.newBuilder(URI.create(url + "&" + connection.get("sharedaccesssignature"))).POST(posted));
            return;
        }
        // learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
        String account = need(connection, "AccountName"), version = "2021-12-02";
        String date = DateTimeFormatter.RFC_1123_DATE_TIME.format(Instant.now().atOffset(ZoneOffset.UTC));
        String signed = "POST\n\n\n" + body.length + "\n\n\n\n\n\n\n\n\nx-ms-date:" + date + "\nx-ms-version:" + version
                + "\n/" + account + url.getRawPath() + "\nmessagettl:-1";
        String signature = sign(Base64.getDecoder().decode(need(connection, "AccountKey")), signed);
        send(HttpRequest.newBuilder(url)
                .header("Authorization", "SharedKey " + account + ":" + signature)
                .header("x-ms-date", date)
                .header("x-ms-version", version)
                .POST(posted));
    }

    static String queueEndpoint(Map<String, String> connection) {
        String endpoint = connection.get("queueendpoint");
        return endpoint != null ? endpoint.replaceAll("/$", "") : connection.getOrDefault("defaultendpointsprotocol", "https")
                + "://" + need(connection, "AccountName") + ".queue." + connection.getOrDefault("endpointsuffix", "core.windows.net");
    }

    static void send(HttpRequest.Builder builder) throws Exception {
        HttpRequest request = builder.timeout(Duration.ofSeconds(30)).build();
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).connectTimeout(Duration.ofSeconds(10)).build();
        HttpResponse<String> response;
        try {
            response = client.send(request, HttpResponse.BodyHandlers.ofString());
        } catch (IOException error) {
            throw new IllegalStateException(request.uri().getAuthority() + " does not answer: " + error);
        }
        if (response.statusCode() != 201) {
            String detail = response.body().replaceAll("<[^>]*>|\\s", " ").replaceAll(" +", " ").strip();
            throw new IllegalStateException("refused with status " + response.statusCode() + ": " + detail);
        }
    }

    static String sign(byte[] key, String text) throws GeneralSecurityException {
        Mac mac = Mac.getInstance("HmacSHA256");
        mac.init(new SecretKeySpec(key, "HmacSHA256"));
        return Base64.getEncoder().encodeToString(mac.doFinal(text.getBytes(UTF_8)));
    }

    // msgpack.org: maps of up to 15 entries, texts, bytes, and numbers up to 127.
    static byte[] msgpack(Object value) {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        if (value instanceof Map<?, ?> map) {
            out.write(0x80 | map.size());
            map.forEach((name, item) -> {
                out.writeBytes(msgpack(name));
                out.writeBytes(msgpack(item));
            });
        } else if (value instanceof Integer number) {
            out.write(number);
        } else {
            byte[] bytes = value instanceof byte[] raw ? raw : value.toString().getBytes(UTF_8);
            out.write(value instanceof byte[] ? 0xc6 : 0xdb);
            out.writeBytes(ByteBuffer.allocate(4).putInt(bytes.length).array());
            out.writeBytes(bytes);
        }
        return out.toByteArray();
    }

    // The JDK has no JSON. A program with a library for it needs none of this.
    static final class Json {
        static final Pattern STRING = Pattern.compile("\"(?:[^\"\\\\\\x00-\\x1f]++|\\\\(?:[\"\\\\/bfnrt]|u[0-9a-fA-F]{4}))*+\"");
        static final Pattern SCALAR = Pattern.compile("true|false|null|-?(?:0|[1-9][0-9]*+)(?:\\.[0-9]++)?(?:[eE][+-]?[0-9]++)?");
        static final Pattern CONTAINER = Pattern.compile("\\[(?:[\0\1](?:,[\0\1])*+)?]|\\{(?:\0:[\0\1](?:,\0:[\0\1])*+)?}");

        static boolean isArray(String text) {
            return text.strip().startsWith("[") && isValue(text);
        }

        static boolean isObject(String text) {
            return text.strip().startsWith("{") && isValue(text);
        }

        // Replaces strings, scalars, and then containers from the inside out by one character each.
        static boolean isValue(String text) {
            if (text.indexOf('\0') >= 0 || text.indexOf('\1') >= 0) {
                return false;
            }
            String left = STRING.matcher(text).replaceAll("\0");
            left = SCALAR.matcher(left).replaceAll("\1").replaceAll("[ \t\r\n]", "");
            for (String before = ""; !before.equals(left); ) {
                before = left;
                left = CONTAINER.matcher(left).replaceAll("\1");
            }
            return left.equals("\1");
        }

        static String text(String value) {
            StringBuilder json = new StringBuilder("\"");
            value.chars().forEach(c -> json.append(c >= ' ' && c <= '~' && c != '"' && c != '\\'
                    ? String.valueOf((char) c) : String.format("\\u%04x", c))); // a header has ASCII only
            return json.append('"').toString();
        }
    }

    static Map<String, String> parse(String connectionString) {
        Map<String, String> parts = new HashMap<>();
        for (String part : connectionString.split(";")) {
            String[] pair = part.split("=", 2);
            parts.put(pair[0].strip().toLowerCase(), pair[pair.length - 1].strip());
        }
        return parts;
    }

    static String need(Map<String, String> connection, String name) {
        String value = connection.get(name.toLowerCase());
        if (value == null) {
            throw new IllegalArgumentException("the connection string has no " + name);
        }
        return value;
    }

    public static void main(String[] given) {
        if (given.length < 3) {
            System.err.println("usage: java Send.java CONNECTION_STRING QUEUE TASK [ARGS] [KWARGS] [TASK_ID]");
            System.exit(2);
        }
        try {
            Map<String, String> connection = parse(given[0]);
            TaskMessage message = TaskMessage.of(given[2], given.length > 3 ? given[3] : "[]",
                    given.length > 4 ? given[4] : "{}", given.length > 5 ? given[5] : UUID.randomUUID().toString());
            if (connection.containsKey("endpoint")) {
                sendToServiceBus(connection, given[1], message);
            } else {
                sendToStorageQueue(connection, given[1], message);
            }
            System.out.println(message.id);
        } catch (Exception error) {
            System.err.println(error.getMessage());
            System.exit(1);
        }
    }
}
