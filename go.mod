module github.com/mysqllock/mysqllock

go 1.25.0

require (
	github.com/DATA-DOG/go-sqlmock v1.5.2
	github.com/anishathalye/porcupine v1.3.1
	github.com/go-sql-driver/mysql v1.10.1
	github.com/ngrok/sqlmw v0.0.0-20220520173518-97c9c04efc79
	go.uber.org/goleak v1.3.0
	golang.org/x/sync v0.22.0
)

require filippo.io/edwards25519 v1.2.0 // indirect
