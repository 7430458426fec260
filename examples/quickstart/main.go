package main

import (
	"context"
	"database/sql"
	"errors"
	"log"

	"github.com/mysqllock/mysqllock"
)

func main() {
	db, err := sql.Open("mysqllock", "app:secret@tcp(127.0.0.1:3306)/shop?maxConns=25")
	if err != nil {
		log.Fatal(err)
	}
	err = mysqllock.Do(context.Background(), db, "product:42", func(ctx context.Context) error {
		var stock int
		if err := db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = 42").Scan(&stock); err != nil {
			return err
		}
		if stock == 0 {
			return errors.New("sold out")
		}
		_, err := db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = 42", stock-1)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}
