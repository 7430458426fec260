-- name: Stock :one
SELECT stock FROM products WHERE id = ?;

-- name: SetStock :exec
UPDATE products SET stock = ? WHERE id = ?;

-- name: Order :exec
INSERT INTO orders (product_id, buyer) VALUES (?, ?);
